// The page pool: K and V of all layers, in blocks of 16 tokens (layout in isa/kernels.h).
//
//   page: [layer 0: [block 0: head 0, head 1, ...][block 1: ...]][layer 1: ...] ...
//
// A page of page_size tokens has page_size / 16 blocks a layer and head. Memory is taken from the
// system when a page is first written.
#pragma once

#include <cstring>

#include "engine/memory.h"
#include "isa/kernels.h"

namespace turnstile {

struct PoolShape {
  Format format;
  int layers, kv_heads, head_dim, page_size;
  int64_t pages;
};

class Pool {
 public:
  // Throws std::invalid_argument for a page size or head size that is not a multiple of 16.
  explicit Pool(const PoolShape& shape);

  static size_t block_bytes(Format format, int head_dim);
  static size_t page_bytes(const PoolShape& shape);

  const PoolShape& shape() const { return shape_; }
  // The block of tokens 16 * index ... of a page.
  uint8_t* block(int64_t page, int layer, int index, int head) const {
    return data_.data() + page * page_bytes_ + layer * layer_bytes_ +
           static_cast<size_t>(index * shape_.kv_heads + head) * block_bytes_;
  }
  // Throws std::out_of_range.
  void copy_page(int64_t source, int64_t target);
  uint8_t* data() const { return data_.data(); }
  size_t bytes() const { return page_bytes_ * shape_.pages; }

 private:
  PoolShape shape_;
  size_t block_bytes_, layer_bytes_, page_bytes_;
  Buffer data_;
};

}  // namespace turnstile
