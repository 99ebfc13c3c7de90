// The device's set of teams: the warps of a block.
#pragma once

#include "core/base/team.hpp"
#include "cuda/device/ptx.cuh"
#include "cuda/device/warp.cuh"

namespace uec::cuda {

class BlockTeams {
 public:
  using Team = Warp;

  // answers [2][warps] in shared memory: a warp may write the next one while others still read.
  UEC_DEVICE explicit BlockTeams(int32_t* answers) : answers_(answers) {}

  UEC_DEVICE static Warp team() { return {}; }
  UEC_DEVICE static int32_t index() { return ptx::thread_idx() / ptx::kWarpSize; }
  UEC_DEVICE static int32_t size() { return ptx::num_threads() / ptx::kWarpSize; }

  UEC_DEVICE const int32_t* exchange(int32_t value) {
    int32_t* const now = answers_ + turn_ * size();
    turn_ ^= 1;
    if (Warp::leader()) now[index()] = value;
    ptx::sync_block();
    return now;
  }

  // The smallest of all threads' values.
  UEC_DEVICE uint32_t min_sync(uint32_t value) {
    const int32_t* const all = exchange(static_cast<int32_t>(Warp::min_sync(value)));
#pragma unroll 1
    for (int32_t i = Warp::index(); i < size(); i += Warp::size())
      value = min_u32(value, static_cast<uint32_t>(all[i]));
    return Warp::min_sync(value);
  }

  UEC_DEVICE static void subtract(int32_t* from, int32_t value) { ptx::add_relaxed(from, -value); }

 private:
  int32_t* const answers_;
  int32_t turn_ = 0;
};

}  // namespace uec::cuda
