// The structs that host and device share. Plain: both compilers lay them out alike, which
// kLayout[] lets a test, and the loader of a cubin, compare.
//
// Addresses are integers where the host cannot follow them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/call_arrays.hpp"
#include "core/failure.hpp"
#include "core/layout.hpp"
#include "core/search.hpp"
#include "cuda/reroute_args.hpp"

namespace uec::cuda {

// Begins a call's block in device memory; its arrays (CallArrays) follow.
struct CallHeader {
  uint64_t digest = 0;   // what this call adds to the chain
  uint64_t regions = 0;  // [G] addresses of main weights (pull), else 0
  int32_t num_tasks = 0;
  int32_t num_pieces = 0;
  int32_t num_destinations = 0;
  int32_t num_expected = 0;
  int32_t num_segments = 0;
  int32_t tile_bytes = 0;
};

// A rank's word to its host, and back: in host memory that the device sees.
struct Status {
  uint64_t failed_epoch = 0;  // 0: none. Written last: the report is complete
  uint64_t cancelled = 0;     // by the host: end every wait
  int64_t disagreement = -1;  // close: a peer whose last call differs
  Report report;
};

// A rank in device memory, for the group's life.
struct RankState {
  // Written once, by the host.
  int32_t rank = 0;
  int32_t num_ranks = 0;
  Capacity capacity;
  SymmetricLayout layout;
  uint64_t bases = 0;          // [G] addresses; 0: no load/store access
  uint64_t far = 0;            // [G] bytes, 1: reached by puts and signals; 0: there are none
  uint64_t pes = 0;            // [G] int32, NVSHMEM's numbers of the ranks
  uint64_t staging = 0;        // symmetric memory for puts: kNumFarStages tiles for each block
  uint64_t segment_bytes = 0;  // [segments] int64
  uint64_t slot_offset = 0;    // [segments] int64
  uint64_t region_offset = 0;  // [segments] int64
  uint64_t status = 0;         // of Status
  uint64_t call_limit_ns = 0;  // until every rank of the plan has called; 0: no limit
  uint64_t wait_limit_ns = 0;  // of each wait from then on; 0: no limit
  // Changes with every call: read by each block as it enters, written by the last to leave.
  uint64_t epoch = 0;  // of the last call that has finished
  uint64_t digest = 0;
  uint64_t last_record = 0;
  uint64_t bytes_stored = 0;
  int32_t entered = 0;  // blocks in the present call
  int32_t left = 0;
  int32_t failed = 0;   // for good
  int32_t settled = 0;  // the failure has been reported
  Report report;
};

// Arguments of the replicate kernel. Rank i of this launch is blockIdx.y = i. Nothing here changes
// from one replay of a captured graph to the next.
struct LaunchArgs {
  uint64_t states = 0;  // [ranks] RankState
  uint64_t calls = 0;   // [ranks] blocks of call_bytes
  int64_t call_bytes = 0;
};

// Why a load has no plan.
enum class LoadFault : int32_t {
  kNone = 0,
  kNegative,      // load of an expert from a source
  kTooMany,       // tokens of an expert, above kMaxLoad
  kTooManyInAll,  // above kMaxTotalLoad
};

// What the plan kernel says of a load. With a fault the plan is empty and has no tokens.
struct PlanStatus {
  LoadFault fault = LoadFault::kNone;
  int32_t expert = -1;  // the first that has it

  // As a word, which is read and written whole; 0: no fault.
  UEC_HD uint64_t word() const {
    if (fault == LoadFault::kNone) return 0;
    return static_cast<uint64_t>(static_cast<uint32_t>(expert)) << 32 |
           static_cast<uint32_t>(fault);
  }
  UEC_HD static PlanStatus of(uint64_t word) {
    if (word == 0) return {};
    return {static_cast<LoadFault>(word), static_cast<int32_t>(word >> 32)};
  }
};

// Arguments of the plan kernel: addresses in device memory.
struct PlanArgs {
  uint64_t home = 0;         // [E] int32
  uint64_t domain = 0;       // [G] int32
  uint64_t mains_begin = 0;  // [G + 1] int32, as group_mains() leaves it
  uint64_t mains = 0;        // [E] int32, likewise
  uint64_t load = 0;         // [sources, E] int32
  uint64_t kept_load = 0;    // [sources, E] int32, out: a copy; 0: none is wanted
  uint64_t slot_expert = 0;  // [G, S] int32, out, as of plan_replicas()
  uint64_t slot_quota = 0;   // [G, S] int32, out
  uint64_t home_quota = 0;   // [E] int32, out
  uint64_t fault = 0;        // of StageFaults::plan
  Objective objective;
  int32_t num_ranks = 0;
  int32_t num_experts = 0;
  int32_t slots_per_rank = 0;
  int32_t num_sources = 0;  // G, or 1: global sums
  int32_t max_mains = 0;    // the largest number of mains on a rank
  int32_t allow_cross_domain = 0;
};

// Faults that the host has not taken yet, in host memory that the device sees. What the device has
// put there stays until then.
struct StageFaults {
  uint64_t plan = 0;  // PlanStatus::word()
  RerouteFaultBox reroute;
};

// What the notice kernel tells the peers.
enum class Notice : int64_t { kRejected = 0, kAborted = 1, kClosed = 2 };

inline constexpr int64_t kHeaderBytes = round_up(sizeof(CallHeader), 8);

inline int64_t call_block_bytes(const Capacity& capacity) {
  CallArrays arrays;
  return round_up(kHeaderBytes + CallArrays::cut(nullptr, capacity, &arrays), 128);
}

inline constexpr int32_t kLayout[] = {
    sizeof(CallHeader),
    offsetof(CallHeader, num_tasks),
    offsetof(CallHeader, tile_bytes),
    sizeof(Status),
    offsetof(Status, report),
    sizeof(RankState),
    sizeof(Report),
    offsetof(Report, root),
    offsetof(Report, seconds),
    sizeof(LaunchArgs),
    offsetof(RankState, layout),
    offsetof(RankState, bases),
    sizeof(Task),
    offsetof(RankState, epoch),
    offsetof(RankState, entered),
    sizeof(Piece),
    offsetof(RankState, report),
    sizeof(Destination),
    sizeof(Expected),
    sizeof(SymmetricLayout),
    sizeof(Capacity),
    sizeof(SharesArgs),
    sizeof(RerouteArgs),
    sizeof(RerouteState),
    sizeof(PlanArgs),
    offsetof(PlanArgs, objective),
    offsetof(PlanArgs, num_ranks),
    offsetof(RerouteArgs, count),
    sizeof(StageFaults),
    offsetof(StageFaults, reroute),
};

}  // namespace uec::cuda
