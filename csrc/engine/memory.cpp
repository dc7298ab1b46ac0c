#include "engine/memory.h"

#include <sys/mman.h>

#include <new>
#include <utility>

namespace turnstile {

namespace {
constexpr size_t kHuge = size_t{2} << 20;
constexpr size_t kGuard = 4096;
}  // namespace

Buffer::Buffer(size_t bytes) : bytes_(bytes) {
  // Small buffers would waste most of a huge page.
  const size_t alignment = bytes >= kHuge / 2 ? kHuge : kGuard;
  mapped_ = (bytes + kGuard + alignment - 1) / alignment * alignment + alignment;
  void* memory = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  mapping_ = static_cast<uint8_t*>(memory);
  const auto address = reinterpret_cast<uintptr_t>(mapping_);
  data_ = mapping_ + ((address + alignment - 1) / alignment * alignment - address);
#if defined(MADV_HUGEPAGE)
  if (alignment == kHuge) madvise(data_, bytes_ + kGuard, MADV_HUGEPAGE);  // a wish, not a need
#endif
}

Buffer::~Buffer() {
  if (mapping_) munmap(mapping_, mapped_);
}

Buffer::Buffer(Buffer&& other) noexcept { *this = std::move(other); }

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(mapping_, other.mapping_);
  std::swap(mapped_, other.mapped_);
  return *this;
}

}  // namespace turnstile
