// What the kernels are compiled for.
#pragma once

#include <cstdint>

namespace uec::cuda {

inline constexpr int32_t kNumThreads = 64;  // a warp that fetches, and one that stores
inline constexpr uint32_t kNumStages = 4;
inline constexpr int32_t kTileSizes[] = {16 << 10, 32 << 10};

// Commits that the store side lets be under way before it waits for the oldest: enough to keep a
// link busy, few enough for a flag to follow its bytes closely.
inline constexpr uint32_t kCommitsInFlight = 3;

// Tiles that a block keeps in symmetric memory for puts to far peers.
inline constexpr int32_t kNumFarStages = 2;

}  // namespace uec::cuda
