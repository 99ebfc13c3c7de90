// The device's team: the threads of a warp.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/base/team.hpp"
#include "cuda/device/ptx.cuh"

namespace uec::cuda {

struct Warp {
  UEC_DEVICE static int32_t index() { return ptx::thread_idx() % ptx::kWarpSize; }
  UEC_DEVICE static constexpr int32_t size() { return ptx::kWarpSize; }
  UEC_DEVICE static bool leader() { return index() == 0; }
  UEC_DEVICE static void sync() { ptx::sync_warp(); }

  template <class T>
  UEC_DEVICE static T broadcast(T value) {
    return read_from(0, value);
  }

  template <class T>
  UEC_DEVICE static T read_from(int32_t lane, T value) {
    static_assert(std::is_trivially_copyable_v<T>);
    uint32_t words[(sizeof(T) + 3) / 4] = {};
    std::memcpy(words, &value, sizeof(T));
    ptx::sync_warp();  // a shuffle orders nothing
    for (uint32_t& word : words) word = ptx::shuffle(word, lane);
    std::memcpy(&value, words, sizeof(T));
    return value;
  }

  UEC_DEVICE static uint32_t min_sync(uint32_t value) {
    ptx::sync_warp();
    return ptx::reduce_min(value);
  }

  UEC_DEVICE static uint32_t min_unordered(uint32_t value) { return ptx::reduce_min(value); }

  template <class T>
  UEC_DEVICE static T exclusive_sum(T value) {
    T sum = value;
    ptx::sync_warp();
    for (int32_t step = 1; step < size(); step *= 2) {
      const int32_t lane = index() < step ? 0 : index() - step;
      T other = static_cast<T>(ptx::shuffle(static_cast<uint32_t>(sum), lane));
      if constexpr (sizeof(T) > sizeof(uint32_t))
        other |= static_cast<T>(ptx::shuffle(static_cast<uint32_t>(sum >> 32), lane)) << 32;
      if (index() >= step) sum += other;
    }
    return sum - value;
  }

  UEC_DEVICE static uint32_t sum(uint32_t value) {
    ptx::sync_warp();
    return ptx::reduce_add(value);
  }
  // Summed in parts that leave room for the sum over a warp.
  UEC_DEVICE static uint64_t sum(uint64_t value) {
    constexpr int32_t kBits = 22;
    constexpr uint32_t kMask = (1u << kBits) - 1;
    ptx::sync_warp();
    const uint64_t low = ptx::reduce_add(static_cast<uint32_t>(value) & kMask);
    const uint64_t middle = ptx::reduce_add(static_cast<uint32_t>(value >> kBits) & kMask);
    const uint64_t high = ptx::reduce_add(static_cast<uint32_t>(value >> (2 * kBits)));
    return low + (middle << kBits) + (high << (2 * kBits));
  }

  UEC_DEVICE static MemberCount count(bool value) {
    ptx::sync_warp();
    const uint32_t members = ptx::ballot(value);
    return {ptx::num_set(members & lower()), ptx::num_set(members)};
  }
  UEC_DEVICE static int32_t equal_before(uint32_t value) {
    ptx::sync_warp();
    return ptx::num_set(ptx::match(value) & lower());
  }

  template <class T>
  UEC_DEVICE static T atomic_add(T* at, T value) {
    return ptx::fetch_add_in_block(at, value);
  }
  UEC_DEVICE static void atomic_min(uint32_t* at, uint32_t value) {
    ptx::lower_in_block(at, value);
  }
  UEC_DEVICE static void set(uint8_t* at) { ptx::set_in_block(at); }

 private:
  // The lanes before this one.
  UEC_DEVICE static uint32_t lower() { return (1u << index()) - 1; }
};

// Whether an mbarrier's n-th phase, counted from 0, is complete. One lane looks: all have to answer
// alike.
UEC_DEVICE bool is_complete(const uint64_t& barrier, uint32_t n) {
  return Warp::broadcast(Warp::leader() && ptx::mbarrier_test(&barrier, n & 1));
}

}  // namespace uec::cuda
