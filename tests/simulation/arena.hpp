// Memory whose whole content can be saved and put back: everything that a schedule changes.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "support/check.hpp"

namespace sim {

class Arena {
 public:
  explicit Arena(size_t capacity)
      : capacity_(capacity),
        memory_(static_cast<uint64_t*>(std::calloc(capacity / 8, 8)), &std::free) {
    CHECK(memory_ != nullptr);
  }

  // Zeroed, and 8-byte aligned.
  template <class T>
  T* array(size_t count) {
    static_assert(alignof(T) <= 8);
    T* const at = reinterpret_cast<T*>(bytes() + used_);
    used_ += (count * sizeof(T) + 7) / 8 * 8;
    CHECK(used_ <= capacity_);
    return at;
  }

  uint8_t* bytes() const { return reinterpret_cast<uint8_t*>(memory_.get()); }
  const uint64_t* words() const { return memory_.get(); }
  size_t used() const { return used_; }

 private:
  size_t capacity_, used_ = 0;
  std::unique_ptr<uint64_t[], decltype(&std::free)> memory_;
};

}  // namespace sim
