// What the kernels are compiled for.
#pragma once

#include <cstdint>

namespace uec::cuda {

// Version of the library that kernels and host are part of: 10000 major + 100 minor + patch.
inline constexpr int32_t kVersion = 100;

// A block of the replicate kernel has several workers: each a warp that fetches, one that stores,
// and a ring of stages between them. A warp takes about a microsecond for a tile, whatever its
// size, so that one worker alone moves 18 GB/s, of 50 that a multiprocessor could
// (bench/results/h100).
inline constexpr int32_t kMaxBlockWorkers = 4;
inline constexpr uint32_t kNumStages = 3;
inline constexpr int32_t kTileMemory = 192 << 10;  // at most, of a block for its workers' stages
// Bounds the workers of all of a rank's blocks: with more, tiles that wait for the links delay
// those that hubs are waiting for.
inline constexpr int32_t kMaxRankWorkers = 128;
// Ranks that share launches: their arguments are passed by value.
inline constexpr int32_t kMaxLaunchRanks = 64;
inline constexpr int32_t kTileSizes[] = {16 << 10, 32 << 10};  // the default first

static_assert(kTileMemory / (kNumStages * kTileSizes[0]) == kMaxBlockWorkers);

// Commits that the store side leaves in flight before it waits for the oldest: enough to keep a
// link busy, few enough for a flag to follow its bytes closely.
inline constexpr uint32_t kCommitsInFlight = 3;

// Tiles that a worker keeps in symmetric memory for puts to far peers.
inline constexpr int32_t kNumFarStages = 2;

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

// The reduction: warps of a block, of which the first directs and the others add; additions that it
// is ahead of them; and loads of 16 bytes that each lane has in flight. See adder.cuh.
inline constexpr int32_t kReduceWarps = 17;
inline constexpr uint32_t kAdditions = 4;
inline constexpr int32_t kAddsInFlight = 8;

// The save of a plan: one block, whose threads have this many words in flight.
inline constexpr int32_t kSaveThreads = 512;
inline constexpr int32_t kWordsAtOnce = 8;
inline constexpr int32_t kSaveSharedBytes = 16;

inline constexpr int32_t kMaxLoadBlocks = 19;   // of a rank
inline constexpr int32_t kSharesThreads = 128;  // a warp for each expert

}  // namespace uec::cuda
