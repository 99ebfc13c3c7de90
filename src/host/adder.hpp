// The host's half of a reduction: the core's Adder, by CPU.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

#include "core/transfer/protocol.hpp"
#include "host/add.hpp"
#include "host/copy.hpp"

namespace uec::host {

class HostAdder : public DeliveryPolicy {
 public:
  template <class Source>
  void sum(uint8_t* to, int32_t n, Source&& source, int64_t elements, GradType type) {
    if (n <= kMaxSources) {
      const uint8_t* from[kMaxSources];
      for (int32_t i = 0; i < n; ++i) from[i] = source(i);
      sum_gradients(reinterpret_cast<float*>(to), false, n, from, elements, type);
    } else {
      // Complete in a cache before any of it is stored: `to` may be among the sources.
      in_blocks(n, source, elements, type, [&](int64_t begin, int64_t count) {
        std::memcpy(to + begin * 4, sums_, count * 4);
      });
    }
    bytes_stored_ += elements * 4;
  }

  template <class Source>
  void add(uint8_t* main, GradType main_type, int32_t n, Source&& source, int64_t elements,
           GradType type) {
    if (n <= kMaxAdded) {
      const uint8_t* from[kMaxAdded];
      for (int32_t i = 0; i < n; ++i) from[i] = source(i);
      add_gradients(main, main_type, n, from, elements, type);
    } else {
      in_blocks(n, source, elements, type, [&](int64_t begin, int64_t count) {
        const auto* const sums = reinterpret_cast<const uint8_t*>(sums_);
        add_gradients(main + begin * bytes_of(main_type), main_type, 1, &sums, count,
                      GradType::kFloat32);
      });
    }
    bytes_stored_ += elements * bytes_of(main_type);
  }

  void zero(uint8_t* to, int64_t bytes) {
    stream_zero(to, bytes);
    bytes_stored_ += bytes;
  }

  // Clearing uses stores that no release orders: see copy.hpp.
  static bool vacant() { return true; }
  static uint32_t ticket() { return 0; }

  template <class F>
  bool try_delivered(uint32_t, F&& then) {
    store_fence();
    then(delivered());
    return true;
  }

  // Values were loaded before their sum was stored; only weakly ordered processors could still
  // move those loads past the check of the abort flags that follows.
  void loads_complete() const {
#if !defined(__x86_64__)
    std::atomic_thread_fence(std::memory_order_acquire);
#endif
  }

  int64_t bytes_stored() const { return bytes_stored_; }

 private:
  static constexpr int64_t kBlock = 2048;  // elements: 8 KiB, and as much of each source

  template <class Source, class Then>
  void in_blocks(int32_t n, Source&& source, int64_t elements, GradType type, Then&& then) {
    const uint8_t* from[kMaxSources];
    for (int64_t begin = 0; begin < elements; begin += kBlock) {
      const int64_t count = std::min(kBlock, elements - begin);
      for (int32_t first = 0; first < n; first += kMaxSources) {
        const int32_t some = std::min(kMaxSources, n - first);
        for (int32_t i = 0; i < some; ++i) from[i] = source(first + i) + begin * bytes_of(type);
        sum_gradients(sums_, first > 0, some, from, count, type);
      }
      then(begin, count);
    }
  }

  alignas(64) float sums_[kBlock];
  int64_t bytes_stored_ = 0;
};

}  // namespace uec::host
