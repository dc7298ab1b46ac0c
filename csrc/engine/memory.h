// Large buffers straight from the kernel: zeroed, aligned to 2 MiB, on huge pages where it grants
// them, and resident only where touched.
#pragma once

#include <cstddef>
#include <cstdint>

namespace turnstile {

class Buffer {
 public:
  Buffer() = default;
  // Throws std::bad_alloc. 4 KiB of zeros past the end may be read, so that a wide load at the edge is
  // harmless.
  explicit Buffer(size_t bytes);
  ~Buffer();
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  uint8_t* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  template <class T>
  T* as() const { return reinterpret_cast<T*>(data_); }

 private:
  uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
  uint8_t* mapping_ = nullptr;
  size_t mapped_ = 0;
};

}  // namespace turnstile
