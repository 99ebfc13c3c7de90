// Scratch memory as one table: the same sequence of take() calls gives the size and the addresses.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/base/common.hpp"

namespace uec {

// Cuts one block of memory into typed arrays. With a null base nothing is touched and the pointers
// are null: only `used_bytes` counts, which is how a scratch type states its size.
class ScratchCutter {
 public:
  UEC_HD explicit ScratchCutter(std::byte* base) : base_(base) {}

  // `count` elements of T, aligned for T provided that the base is aligned to 8 bytes.
  template <typename T>
  UEC_HD T* take(int64_t count) {
    static_assert(alignof(T) <= 8, "the base is aligned to 8 bytes only");
    constexpr int64_t kAlign = alignof(T);
    used_bytes_ = (used_bytes_ + kAlign - 1) & -kAlign;
    T* const array = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_bytes_);
    used_bytes_ += count * static_cast<int64_t>(sizeof(T));
    return array;
  }

  // Memory to be cut up further: aligned to 8 bytes.
  UEC_HD std::byte* take_bytes(int64_t count) {
    return reinterpret_cast<std::byte*>(take<int64_t>(ceil_div(count, 8)));
  }

  UEC_HD int64_t used_bytes() const { return used_bytes_; }

 private:
  std::byte* base_;
  int64_t used_bytes_ = 0;
};

}  // namespace uec
