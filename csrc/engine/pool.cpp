#include "engine/pool.h"

#include <stdexcept>
#include <string>

namespace turnstile {

size_t Pool::block_bytes(Format format, int head_dim) {
  const size_t values = 2 * static_cast<size_t>(head_dim) * kTokens;
  switch (format) {
    case Format::int8: return values + 2 * 4 * kTokens;
    case Format::bfloat16: return 2 * values;
    case Format::float32: return 4 * values;
  }
  return 0;
}

size_t Pool::page_bytes(const PoolShape& shape) {
  if (shape.page_size < kTokens || shape.page_size % kTokens)
    throw std::invalid_argument("the native backend needs a page size that is a multiple of 16, not " +
                                std::to_string(shape.page_size));
  if (shape.head_dim < 16 || shape.head_dim % 16 || shape.head_dim > kMostDimensions)
    throw std::invalid_argument("the native backend needs a head size that is a multiple of 16 up to " +
                                std::to_string(kMostDimensions) + ", not " + std::to_string(shape.head_dim));
  return block_bytes(shape.format, shape.head_dim) * shape.kv_heads * shape.layers * (shape.page_size / kTokens);
}

Pool::Pool(const PoolShape& shape)
    : shape_(shape),
      block_bytes_(block_bytes(shape.format, shape.head_dim)),
      layer_bytes_(block_bytes_ * shape.kv_heads * (shape.page_size / kTokens)),
      page_bytes_(page_bytes(shape)),
      data_(page_bytes_ * shape.pages) {}

void Pool::copy_page(int64_t source, int64_t target) {
  if (source < 0 || target < 0 || source >= shape_.pages || target >= shape_.pages)
    throw std::out_of_range("copy of a page outside the pool");
  std::memcpy(block(target, 0, 0, 0), block(source, 0, 0, 0), page_bytes_);
}

}  // namespace turnstile
