// What the load kernels are given: a rank's ids, and where its results go.
#pragma once

#include <cstdint>

#include "core/common.hpp"

namespace uec::cuda {

// Ranks that one launch may have: their arguments are passed by value.
inline constexpr int32_t kMaxLaunchRanks = 64;

struct LoadCall {
  uint64_t ids = 0;      // [count], aligned to an id; -1 is padding
  int64_t count = 0;     // the same in every replay of a captured graph
  uint64_t load = 0;     // [G, E] int32, out; not written by a call that fails
  int32_t id_bytes = 8;  // 4 or 8
};

// Arguments of the load kernel. Rank i of this launch is blockIdx.y = i.
struct LoadArgs {
  uint64_t states = 0;  // [ranks] RankState
  LoadCall calls[kMaxLaunchRanks];
};

// The first bad id of a call, as a word of which blocks keep the largest; 0: there is none. Its own
// inverse.
UEC_HD constexpr uint64_t bad_id_word(uint64_t position) { return ~position; }

}  // namespace uec::cuda
