// What src/cuda/device/far.cuh declares, over a network that delivers in any order.
#pragma once

#include "cuda/device/ptx.cuh"

namespace uec::cuda::far {

inline void put(void* symmetric, const void* source, int64_t bytes, int32_t pe) {
  ptx::sync_warp();
  if (emulation::lane() == 0) {
    uint8_t* const to = emulation::Network::instance().translate(symmetric, pe);
    emulation::self().warp->far_unordered.store(true, std::memory_order_relaxed);
    emulation::submit_far(true, [=] { std::memcpy(to, source, static_cast<size_t>(bytes)); });
  }
  ptx::sync_warp();
}

inline void signal(uint64_t* flag, uint64_t value, int32_t pe) {
  auto* const to = reinterpret_cast<uint64_t*>(emulation::Network::instance().translate(flag, pe));
  emulation::submit_far(false, [=] { emulation::Network::instance().set(to, value); });
}

inline void put_signal(void* symmetric, const void* source, int64_t bytes, uint64_t* flag,
                       uint64_t value, int32_t pe) {
  ptx::sync_warp();
  if (emulation::lane() == 0) {
    // The flag would say that those bytes are there too.
    if (emulation::self().warp->far_unordered.load(std::memory_order_relaxed))
      emulation::violate("a signal follows puts without fence");
    auto& network = emulation::Network::instance();
    uint8_t* const to = network.translate(symmetric, pe);
    auto* const there = reinterpret_cast<uint64_t*>(network.translate(flag, pe));
    emulation::submit_far(false, [=] {
      std::memcpy(to, source, static_cast<size_t>(bytes));
      emulation::Network::instance().set(there, value);
    });
  }
  ptx::sync_warp();
}

inline void fence() { emulation::far_quiet(); }
inline void quiet() { emulation::far_quiet(); }
// May ask a proxy on the host: only for what far peers have written, once it is there.
inline void acquire(uint64_t* flag, uint64_t seen) {
  if (emulation::Network::instance().signalled(flag) != seen)
    emulation::violate("the network is asked about a flag that no far peer has written");
}

}  // namespace uec::cuda::far
