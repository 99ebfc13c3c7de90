// What src/cuda/device/ptx.cuh declares, on the CPU. Kernels that are compiled with this folder
// ahead of src/ run in emulation::launch().
#pragma once

#include <bit>
#include <chrono>
#include <cstdint>

#include "device.hpp"

#define UEC_DEVICE inline
#define UEC_ROLE inline
#define UEC_DEVICE_NOINLINE inline

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

namespace uec::ptx {

inline constexpr int32_t kWarpSize = emulation::kLanes;

using emulation::self;

inline int32_t thread_idx() { return self().thread; }
inline int32_t num_threads() { return emulation::kLanes * self().num_warps; }
inline int32_t block_x() { return self().block_x; }
inline int32_t block_y() { return self().block_y; }
inline int32_t num_blocks_x() { return self().num_blocks_x; }

inline void sync_warp() { emulation::meet(); }
inline void sync_block() { self().block->barrier.wait(); }
inline uint32_t shuffle(uint32_t value, int32_t lane) {
  self().warp->values[emulation::lane()] = value;
  sync_warp();
  const uint32_t result = self().warp->values[lane];
  sync_warp();
  return result;
}
inline uint32_t reduce_min(uint32_t value) {
  self().warp->values[emulation::lane()] = value;
  sync_warp();
  uint32_t result = self().warp->values[0];
  for (const uint32_t other : self().warp->values) result = other < result ? other : result;
  sync_warp();
  return result;
}
inline uint32_t reduce_add(uint32_t value) {
  self().warp->values[emulation::lane()] = value;
  sync_warp();
  uint32_t result = 0;
  for (const uint32_t other : self().warp->values) result += other;
  sync_warp();
  return result;
}

template <class T>
T fetch_add_in_block(T* at, T value) {
  return std::atomic_ref(*at).fetch_add(value, std::memory_order_relaxed);
}
inline void lower_in_block(uint32_t* at, uint32_t value) {
  std::atomic_ref least(*at);
  uint32_t now = least.load(std::memory_order_relaxed);
  while (value < now && !least.compare_exchange_weak(now, value, std::memory_order_relaxed)) {
  }
}
inline void set_in_block(uint8_t* at) { std::atomic_ref(*at).store(1, std::memory_order_relaxed); }

inline uint32_t ballot(bool value) {
  self().warp->values[emulation::lane()] = value;
  sync_warp();
  uint32_t bits = 0;
  for (int32_t i = 0; i < kWarpSize; ++i) bits |= self().warp->values[i] << i;
  sync_warp();
  return bits;
}
inline uint32_t match(uint32_t value) {
  self().warp->values[emulation::lane()] = value;
  sync_warp();
  uint32_t bits = 0;
  for (int32_t i = 0; i < kWarpSize; ++i)
    bits |= static_cast<uint32_t>(self().warp->values[i] == value) << i;
  sync_warp();
  return bits;
}
inline int32_t num_set(uint32_t bits) { return std::popcount(bits); }
inline int32_t lowest_set(uint32_t bits) { return std::countr_zero(bits); }

inline uint64_t load_acquire_system(const uint64_t* at) {
  emulation::look();
  emulation::observed();
  return std::atomic_ref(*const_cast<uint64_t*>(at)).load(std::memory_order_acquire);
}
inline void store_release_system(uint64_t* at, uint64_t value) {
  if (self().warp->unfenced_deliveries.load(std::memory_order_relaxed) != 0)
    emulation::violate("a publish follows the wait for its delivery without proxy fence");
  std::atomic_ref(*at).store(value, std::memory_order_release);
  emulation::act();
}
inline void fence_system() {}
// ThreadSanitizer knows no fences, so that the stores behind it are releases here.
inline void fence_release_system() {}
inline void store_relaxed_system(uint64_t* at, uint64_t value) { store_release_system(at, value); }

inline int32_t load_relaxed(const int32_t* at) {
  emulation::look();
  return std::atomic_ref(*const_cast<int32_t*>(at)).load(std::memory_order_relaxed);
}
inline int32_t compare_swap_relaxed(int32_t* at, int32_t expected, int32_t value) {
  std::atomic_ref(*at).compare_exchange_strong(expected, value, std::memory_order_relaxed);
  emulation::act();
  return expected;
}
inline int32_t fetch_add_relaxed(int32_t* at, int32_t value) {
  const int32_t drawn = std::atomic_ref(*at).fetch_add(value, std::memory_order_relaxed);
  emulation::act();
  emulation::hold_up();
  return drawn;
}
inline int32_t fetch_add_acq_rel(int32_t* at, int32_t value) {
  const int32_t before = std::atomic_ref(*at).fetch_add(value, std::memory_order_acq_rel);
  emulation::act();
  return before;
}
inline uint64_t load_acquire_device(const uint64_t* at) {
  emulation::look();
  return std::atomic_ref(*const_cast<uint64_t*>(at)).load(std::memory_order_acquire);
}
inline void store_release_device(uint64_t* at, uint64_t value) {
  std::atomic_ref(*at).store(value, std::memory_order_release);
  emulation::act();
}
inline uint64_t fetch_max_relaxed(uint64_t* at, uint64_t value) {
  std::atomic_ref<uint64_t> atomic(*at);
  uint64_t old = atomic.load(std::memory_order_relaxed);
  while (old < value && !atomic.compare_exchange_weak(old, value, std::memory_order_relaxed)) {
  }
  emulation::act();
  return old;
}
inline void max_relaxed(uint64_t* at, uint64_t value) { fetch_max_relaxed(at, value); }
inline void add_relaxed(uint64_t* at, uint64_t value) {
  std::atomic_ref(*at).fetch_add(value, std::memory_order_relaxed);
  emulation::act();
}
inline void add_relaxed(int32_t* at, int32_t value) {
  std::atomic_ref(*at).fetch_add(value, std::memory_order_relaxed);
  emulation::act();
}
inline void add_shared_relaxed(int32_t* at, int32_t value) { add_relaxed(at, value); }
inline int32_t load_shared_relaxed(const int32_t* at) { return load_relaxed(at); }
inline void store_shared_relaxed(int32_t* at, int32_t value) {
  std::atomic_ref(*at).store(value, std::memory_order_relaxed);
  emulation::act();
}

template <class T>
T load_global(const T* at) {
  if (reinterpret_cast<uintptr_t>(at) % sizeof(T) != 0)
    emulation::violate("a load from an address that is no multiple of its size");
  return *at;
}

inline float add(float a, float b) { return a + b; }

inline void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
  const emulation::Mbarrier fresh{0, arrivals, arrivals, 0};
  std::memcpy(barrier, &fresh, 8);
}
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive(uint64_t* barrier) {
  emulation::update(barrier, [](emulation::Mbarrier& b) { --b.pending; });
}
inline void mbarrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
  emulation::update(barrier, [=](emulation::Mbarrier& b) {
    --b.pending;
    b.bytes += static_cast<int32_t>(bytes);
  });
}
inline bool mbarrier_test(const uint64_t* barrier, uint32_t parity) {
  emulation::look();
  const uint64_t word =
      std::atomic_ref(*const_cast<uint64_t*>(barrier)).load(std::memory_order_acquire);
  emulation::Mbarrier state;
  std::memcpy(&state, &word, 8);
  if (state.phase == parity) return false;
  emulation::observed();  // the other side's, handed over
  return true;
}

inline void fence_proxy_async_global() {
  emulation::fence_observations();
  self().warp->unfenced_deliveries.fetch_and(~emulation::lane_bit(), std::memory_order_relaxed);
}
inline void fence_proxy_async_shared() {}
inline void bulk_load(void* shared, const void* global, uint32_t bytes, uint64_t* barrier,
                      bool once) {
  const auto& is_own = *emulation::self().is_own;
  if (is_own && is_own(block_y(), global) == once)
    emulation::violate("L2 is to keep main weights, or to give up slots");
  emulation::bulk_load(static_cast<uint8_t*>(shared), static_cast<const uint8_t*>(global), bytes,
                       barrier);
}
inline void bulk_store(void* global, const void* shared, uint32_t bytes) {
  emulation::bulk_store(static_cast<uint8_t*>(global), static_cast<const uint8_t*>(shared), bytes);
}
inline void bulk_commit() { emulation::bulk_commit(); }
template <int kPending>
void bulk_wait_read() {
  emulation::bulk_wait(kPending, true);
}
template <int kPending>
void bulk_wait() {
  emulation::bulk_wait(kPending, false);
}

// Set back once, early on: nothing guarantees that a device's clock never is.
inline uint64_t nanoseconds() {
  if (self().clock_behind == 0 && emulation::roll() % 8 == 0) self().clock_behind = 40'000'000;
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count()) -
         self().clock_behind;
}
inline void pause() { Fibers::pause(); }

}  // namespace uec::ptx
