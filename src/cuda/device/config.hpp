// What the kernels are compiled for, but for the bounds of transfers: core/base/bounds.hpp.
#pragma once

#include <cstdint>

#include "core/base/bounds.hpp"

namespace uec::cuda {

// Version of the library that kernels and host are part of: 10000 major + 100 minor + patch.
inline constexpr int32_t kVersion = 100;

// Ranks that share launches: their arguments are passed by value.
inline constexpr int32_t kMaxLaunchRanks = 64;

// The reroute. 65536 ids are 64 blocks, a warp for each 64 of them.
inline constexpr int32_t kRerouteThreads = 512;
inline constexpr int32_t kIdsPerThread = 2;
inline constexpr int32_t kTokensPerWarp = 4;  // of a routing map; at most 8

// A window has 2^this many runs, whose counts a block sums itself. The sum of everything before the
// window comes from the last block of the previous one, which costs a hop.
inline constexpr int32_t kWindowLog2 = 7;
// What a thread loads before it waits: rows of counts, warps' counts, and columns of a map.
inline constexpr int32_t kRowsInFlight = 8;
inline constexpr int32_t kCountsAtOnce = 8;
inline constexpr int32_t kColumnsAtOnce = 4;

// The load. A thread has this many ids if there are enough blocks, and this many quads of 4 words
// in flight, of ids and of the table. So many warps exchange rows: 64 ranks are one for each lane.
inline constexpr int32_t kLoadThreads = 512;
inline constexpr int32_t kIdsPerLoadThread = 8;
inline constexpr int32_t kQuadsAtOnce = 4;
inline constexpr int32_t kTableQuadsAtOnce = 8;
inline constexpr int32_t kLoadTeams = 2;

// Rows of a load that a thread of the planner has in flight.
inline constexpr int32_t kSourcesAtOnce = 16;

// The save of a plan: one block, whose threads have this many words in flight.
inline constexpr int32_t kSaveThreads = 512;
inline constexpr int32_t kWordsAtOnce = 8;
inline constexpr int32_t kSaveSharedBytes = 16;

inline constexpr int32_t kMaxLoadBlocks = 19;   // of a rank
inline constexpr int32_t kSharesThreads = 128;  // a warp for each expert

}  // namespace uec::cuda
