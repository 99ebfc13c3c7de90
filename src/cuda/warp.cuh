// The device's team: the threads of a warp.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/ptx.cuh"

namespace uec::cuda {

struct Warp {
  UEC_DEVICE static int32_t index() { return ptx::thread_idx() % ptx::kWarpSize; }
  UEC_DEVICE static constexpr int32_t size() { return ptx::kWarpSize; }
  UEC_DEVICE static bool leader() { return index() == 0; }
  UEC_DEVICE static void sync() { ptx::sync_warp(); }

  template <class T>
  UEC_DEVICE static T share(T value) {
    return from(0, value);
  }

  template <class T>
  UEC_DEVICE static T from(int32_t lane, T value) {
    static_assert(std::is_trivially_copyable_v<T>);
    uint32_t words[(sizeof(T) + 3) / 4] = {};
    std::memcpy(words, &value, sizeof(T));
    ptx::sync_warp();  // a shuffle orders nothing
    for (uint32_t& word : words) word = ptx::shuffle(word, lane);
    std::memcpy(&value, words, sizeof(T));
    return value;
  }

  UEC_DEVICE static uint32_t lowest(uint32_t value) {
    ptx::sync_warp();
    return ptx::reduce_min(value);
  }

  UEC_DEVICE static uint64_t sum_before(uint64_t value) {
    uint64_t sum = value;
    for (int32_t step = 1; step < size(); step *= 2) {
      const uint64_t other = from(index() < step ? 0 : index() - step, sum);
      if (index() >= step) sum += other;
    }
    return sum - value;
  }
};

}  // namespace uec::cuda
