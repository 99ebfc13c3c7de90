// The numbers of the transfers that trade one thing for another, and what they trade. The timeline
// of cuda/device/replicate.cuh says where those of a replication act. Sizes of other kernels are in
// cuda/device/config.hpp.
#pragma once

#include <cstdint>

namespace uec {

// ---- grain --------------------------------------------------------------------------------------

// Bytes of a flag group. A hub forwards after each group: small enough that many hubs in a row add
// little latency, large enough that flags stay cheap.
inline constexpr int64_t kGroupBytes = 32 << 10;
// Bytes of a tile that kernels take, the default first. A warp takes about a microsecond for a
// tile, whatever its size: larger ones need fewer workers, smaller ones leave room for more.
inline constexpr int32_t kTileSizes[] = {16 << 10, 32 << 10};

// ---- workers of a block, each a warp that fetches, one that stores, and stages between them -----

// One worker alone moves 18 GB/s, of 50 that a multiprocessor could (bench/results/h100).
inline constexpr int32_t kMaxBlockWorkers = 4;
// Stages of a worker: one to load into, one to store from, one whose stores still read it.
inline constexpr uint32_t kNumStages = 3;
inline constexpr int32_t kTileMemory = 192 << 10;  // at most, of a block for its workers' stages
// Of all of a rank's blocks: with more, tiles that wait for the links delay those that hubs are
// waiting for.
inline constexpr int32_t kMaxRankWorkers = 128;

static_assert(kTileMemory / (kNumStages * kTileSizes[0]) == kMaxBlockWorkers);

// ---- in flight ----------------------------------------------------------------------------------

// Commits of bulk stores before the store side waits for the oldest: enough to keep a link busy,
// few enough for a flag to follow its bytes closely.
inline constexpr uint32_t kCommitsInFlight = 3;
// Groups that are stored but not yet published: more would only wait for the same deliveries.
inline constexpr uint32_t kMaxUnpublished = 4;
// Tiles that a worker keeps in symmetric memory for puts to peers without load/store access.
inline constexpr int32_t kNumFarStages = 2;

// ---- polls --------------------------------------------------------------------------------------

// Groups that the fetch side takes before it looks again at what it waits for: a look costs a trip
// to memory, which a group that waits for nobody must not pay on its own.
inline constexpr int32_t kGroupsPerPoll = 4;
// Looks of the store side at the ring before it waits for its own stores: the next tile may be on
// its way from memory, which takes a few.
inline constexpr uint32_t kIdlePolls = 4;
// Idle steps of the store side before it looks whether its block has stopped: what comes next is
// rarely far.
inline constexpr uint32_t kIdleStepsPerStop = 8;
// Steps before a warp looks for failures: in the device's memory that costs a microsecond, in the
// host's more.
inline constexpr uint32_t kStepsPerPoll = 16;
inline constexpr uint32_t kStepsPerLongPoll = 256;

// ---- the reduction ------------------------------------------------------------------------------

// Groups of an expert, or of each hub of it: for 64 blocks two each, so that who reads a hub's sums
// is behind it by half of them at most.
inline constexpr int32_t kReduceGroups = 128;
inline constexpr int32_t kMostUnits = 2;  // flag groups in one of a hub: more delay the home
// Warps of a block, of which the first directs and the others add; additions that it is ahead of
// them; and loads of 16 bytes that each lane has in flight. See cuda/device/adder.cuh.
inline constexpr int32_t kReduceWarps = 17;
inline constexpr uint32_t kAdditions = 4;
inline constexpr int32_t kAddsInFlight = 8;

}  // namespace uec
