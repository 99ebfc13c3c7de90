// What the load kernels are given: a rank's ids, or counts, and where its results go.
#pragma once

#include <cstdint>

#include "core/base/common.hpp"
#include "cuda/device/config.hpp"
#include "cuda/device/device_ptr.hpp"

namespace uec::cuda {

struct RankState;

struct LoadCall {
  uint64_t ids = 0;             // [count], aligned to an id; -1 is padding; or counts [E], int32
  int64_t count = 0;            // the same in every replay of a captured graph
  DevicePtr<int32_t> load = 0;  // [G, E], out; zeros if the call fails
  int32_t id_bytes = 8;         // 4 or 8; 0: they are counts
};

// Arguments of the load kernel. Rank i of this launch is blockIdx.y = i.
struct LoadArgs {
  DevicePtr<RankState> states = 0;  // [ranks]
  int64_t has_call_number = 1;      // as LaunchArgs has it
  LoadCall calls[kMaxLaunchRanks];
};

// The position of the first out-of-range id of a call, as a word of which blocks keep the largest;
// 0: there is none. The function is its own inverse.
UEC_HD constexpr uint64_t bad_id_word(uint64_t position) { return ~position; }

}  // namespace uec::cuda
