// What a block of the replicate or the reduce kernel keeps in shared memory; the host requests that
// much.
#pragma once

#include "core/transfer/announce.hpp"
#include "core/transfer/prepare.hpp"
#include "core/transfer/ring.hpp"
#include "core/transfer/stripe.hpp"
#include "cuda/device/args.hpp"
#include "cuda/device/config.hpp"

namespace uec::cuda {

// A warp's bounded waits, kept by its leader: one clock for each wait.
struct Clock {
  uint64_t since, called_since;
  int32_t waiting, called;
};

// One call on one rank, as a block sees it.
struct BlockCall {
  Call call;
  RankState* state;
  uint8_t* own;  // this rank's symmetric memory
  int32_t stop;  // a warp of this block has seen the failure
  Clock clock;   // of the end, and of a reduction
};

// The stages' barriers and descriptions.
struct Ring {
  uint64_t full[kNumStages];
  uint64_t empty[kNumStages];
  Stage stages[kNumStages];
  uint64_t bytes_stored;            // of the store side
  uint32_t far_stages, far_staged;  // tiles prepared for puts, and one more than the last one's
};

// Room behind a CallShared for a copy of the call's block: enough for 64 ranks and a hundred
// replicas. What does not fit is read where it is.
inline constexpr int64_t kNearbyBytes = 8 << 10;

// A block's part in a call of any kind.
struct alignas(16) CallShared {
  RankState known;  // a copy of what stays the same during a call; the rest is not filled
  BlockCall block;
  struct {
    uint64_t digest;
    int32_t bytes;
    uint32_t pointers;
  } header;              // a copy; the body's is in the call
  int32_t first;         // this block began first: it announces the call
  int32_t polls_cancel;  // it began last: it polls whether the host has cancelled the call
  int32_t healthy;       // the rank has not failed before
  int32_t prepared;      // and the call's block is there
};

// What the two warps of a worker share.
struct WorkerShared {
  Ring ring;
  UnpublishedGroup unpublished[kMaxUnpublished];
  Clock clock;  // of the fetch side's waits
};

// Shared memory of the replicate kernel. Behind it lie the copy, and of each worker the fetch
// side's scratch and then the tiles.
struct BlockShared : CallShared {
  WorkerShared workers[kMaxBlockWorkers];
};

// What making the call's block takes, in memory that is not in use yet. Behind it lie the arrays.
struct PrepareShared {
  GroupTables tables;
  Call call;
  PrepareArrays arrays;
  PlanShape shape;
  ReplicateArgs args;
  ReduceArgs reduce;
  uint64_t digest;  // up to the mode
  int32_t segments[kMaxDeviceSegments];
  GradType main_type[kMaxDeviceSegments];
};
static_assert(sizeof(PrepareShared) <= kPrepareBytes);

UEC_HD inline int64_t prepare_bytes(const Capacity& c) {
  return kPrepareBytes + PrepareArrays{}.cut(nullptr, c);
}

inline constexpr int64_t kTileAlign = 128;

inline constexpr int64_t kScratchAt = sizeof(BlockShared) + kNearbyBytes;

UEC_HD inline int64_t tiles_offset(const Capacity& c) {
  StripeScratch none;
  const int64_t scratch = StripeScratch::cut(nullptr, c.num_ranks, c.pieces(), &none);
  return round_up(kScratchAt + kMaxBlockWorkers * scratch, kTileAlign);
}

// Workers of each of a rank's blocks: as many as there is shared memory for, and at least one.
UEC_HD inline int32_t block_workers(const Capacity& c, int64_t tile_bytes, int64_t max_shared_bytes,
                                    int32_t num_blocks) {
  const int64_t room = min64(kTileMemory, max_shared_bytes - tiles_offset(c));
  const auto fitting = static_cast<int32_t>(room / (kNumStages * tile_bytes));
  return max32(1, min32(fitting, kMaxRankWorkers / num_blocks));
}

// Bytes of dynamic shared memory that a launch asks for.
UEC_HD inline int64_t shared_bytes(const Capacity& c, int64_t tile_bytes, int32_t num_workers) {
  return tiles_offset(c) + max64(num_workers * kNumStages * tile_bytes, prepare_bytes(c));
}

// What is to be done with one tile: see Reducer.
struct Addition {
  uint8_t* to;
  int64_t elements;  // kZero: bytes; 0: there are no more
  const uint8_t** sources;
  int32_t n;  // of these
  Reduction::Kind kind;
  GradType from, type;  // of the addends, of `to`
  int32_t aligned;      // all addresses
};

// Between the warp that directs a block's additions and those that add.
struct AddRing {
  uint64_t full[kAdditions];
  uint64_t empty[kAdditions];
  Addition additions[kAdditions];
  uint64_t bytes_stored;
};

// Shared memory of the reduce kernel. Behind it lie the copy, and the scratch of the first warp.
struct ReduceShared : CallShared {
  AddRing ring;
  UnpublishedGroup unpublished[kMaxUnpublished];
};

struct ReduceScratch {
  const uint8_t** sources;  // [kAdditions][num_ranks]
  StripeScratch stripe;

  // Works as StripeScratch::cut().
  UEC_HD int64_t cut(std::byte* memory, const Capacity& c) {
    ScratchCutter cutter(memory);
    sources = cutter.take<const uint8_t*>(kAdditions * c.num_ranks);
    const int64_t bytes = StripeScratch::cut(nullptr, c.num_ranks, c.reductions(), &stripe);
    StripeScratch::cut(cutter.take_bytes(bytes), c.num_ranks, c.reductions(), &stripe);
    return cutter.used_bytes();
  }
};

inline constexpr int64_t kReduceScratch = sizeof(ReduceShared) + kNearbyBytes;

UEC_HD inline int64_t reduce_shared_bytes(const Capacity& c) {
  ReduceScratch none;
  return kReduceScratch + max64(none.cut(nullptr, c), prepare_bytes(c));
}

}  // namespace uec::cuda
