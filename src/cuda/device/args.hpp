// The structs that host and device share. They are plain, so that both compilers lay them out
// alike; kLayoutHash lets the loader of a cubin compare.
//
// Addresses that only the device can follow are DevicePtr.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "core/plan/search.hpp"
#include "core/schedule/cost.hpp"
#include "core/transfer/bank.hpp"
#include "core/transfer/call_arrays.hpp"
#include "core/transfer/failure.hpp"
#include "core/transfer/layout.hpp"
#include "core/transfer/prepare.hpp"
#include "cuda/device/call_block.hpp"
#include "cuda/device/config.hpp"
#include "cuda/device/device_ptr.hpp"
#include "cuda/device/load_args.hpp"
#include "cuda/device/reroute_args.hpp"

namespace uec::cuda {

// What a rank reports to its host, and the reverse: in host memory that the device can address.
struct Status {
  uint64_t failed_call = 0;   // by the host's numbers; 0: none. Written last, after the report
  uint64_t cancelled = 0;     // by the host: end every wait
  int64_t disagreement = -1;  // close: a peer whose last call differs
  int64_t bad_position = -1;  // load: of the first bad id, if this rank's own made it reject;
                              // -2 - e: the count of expert e
  int64_t bad_id = 0;         // its value
  Report report;
};

// What a call is made in, in shared memory.
struct PrepareArrays {
  ScheduleArrays schedule{};
  CallArrays arrays{};

  // Cuts what begins at `memory`, aligned to 8 bytes; null: only the size. Returns the bytes.
  UEC_HD int64_t cut(std::byte* memory, const Capacity& c) {
    ScratchCutter cutter(memory);
    ScheduleArrays::cut(cutter.take_bytes(ScheduleArrays::cut(nullptr, c, &schedule)), c,
                        &schedule);
    CallArrays::cut(cutter.take_bytes(CallArrays::cut(nullptr, c, &arrays)), c, &arrays);
    return cutter.used_bytes();
  }
};

// A rank in device memory, for the group's life.
struct alignas(16) RankState {
  // Written once, by the host.
  int32_t rank = 0;
  int32_t num_ranks = 0;
  Capacity capacity;
  SymmetricLayout layout;
  DevicePtr<uint8_t> memory = 0;        // its own symmetric memory
  DevicePtr<uint8_t* const> bases = 0;  // [G] addresses; 0: no load/store access
  DevicePtr<const uint8_t> far = 0;     // [G], 1: reached by puts and signals; 0: there are none
  DevicePtr<const int32_t> pes = 0;     // [G], NVSHMEM's numbers of the ranks
  DevicePtr<uint8_t> staging = 0;  // symmetric memory for puts: kNumFarStages tiles for each worker
  DevicePtr<const int64_t> segment_bytes = 0;  // [segments]
  DevicePtr<const int32_t> home = 0;           // [E]
  DevicePtr<const int32_t> domain = 0;         // [G]
  DevicePtr<const int32_t> local_idx = 0;      // [E], index among the home's local experts
  int64_t tile_bytes = 0;
  CostModel cost;
  int32_t allow_cross_domain = 0;
  DevicePtr<Status> status = 0;
  uint64_t call_limit_ns = 0;               // until every rank of the plan has called; 0: no limit
  uint64_t wait_limit_ns = 0;               // of each wait from then on; 0: no limit
  DevicePtr<const int64_t> grad_bytes = 0;  // [grad segments], of one expert in a slot
  DevicePtr<const GradType> grad_type = 0;  // [grad segments], in a slot
  DevicePtr<int32_t> counts = 0;            // [E], sums of a load's blocks: zero between launches
  DevicePtr<BankTable> banks = 0;           // [banks]
  DevicePtr<const int64_t> offsets = 0;     // as BankTables has them
  DevicePtr<uint64_t> slot_words = 0;       // [banks][S] of ready.cuh
  // Of the tables that calls point to, which begin with the bases.
  DevicePtr<const void> tables_end = 0;
  PrepareArrays scratch_layout;  // as if PrepareShared lay there
  int64_t tiles_at = 0;          // tiles_offset()
  // Changes with every call: read by each block as it begins, written by the last to finish.
  uint64_t epoch = 0;  // of the last call that has finished
  uint64_t digest = 0;
  uint64_t last_record = 0;
  uint64_t last_call = 0;  // the host's number: replays of a graph have epochs, but no number
  // Changes within a call.
  alignas(16) uint64_t prepared = 0;  // epoch whose block the device has made
  uint64_t bytes_stored = 0;
  uint64_t bad_id = 0;  // of the present load: bad_id_word()
  int32_t entered = 0;  // blocks in the present call
  int32_t left = 0;
  int32_t failed = 0;  // for good
  int32_t failure_published = 0;
  Report report;
};

// A rank's call whose plan is in device memory: its first block checks the plan and makes the
// call's block, as the host does for plans in host memory.
struct DeviceCall {
  DevicePtr<const int32_t> slot_expert = 0;  // [G, S]; 0: the host has made the block
  DevicePtr<const int32_t> slot_quota = 0;   // [G, S], or 0
  DevicePtr<const int32_t> home_quota = 0;   // [E], or 0
  DevicePtr<const int32_t> home = 0;         // [E], to be the group's; 0: it is
  // [segments of the group][M] addresses of main weights; of a reduction:
  // [grad segments][M] of main gradients.
  DevicePtr<const uint8_t* const> main_ptrs = 0;
  union {
    // Of the region that these fill, as take_region() has it; 0: no pull.
    DevicePtr<const uint64_t> region_at = 0;
    // Of a reduction: SaveArgs::in_use of its plan, cleared at the end, or 0.
    DevicePtr<uint64_t> in_use;
  };
  // Bit i: transfers segment i; of a reduction: the GradType of main gradients of segment i.
  uint32_t segments = 0;
  int8_t mode = -1;  // a Mode, or -1: by cost
  int8_t zero = 0;   // of a reduction: slot gradients are cleared
  int16_t region = -1;
};
inline constexpr int32_t kMaxDeviceSegments = 32;

// Arguments of the replicate and the reduce kernel. Rank i of this launch is blockIdx.y = i.
// Nothing here changes from one replay of a captured graph to the next.
struct LaunchArgs {
  DevicePtr<RankState> states = 0;  // [ranks]
  DevicePtr<std::byte> calls = 0;   // [ranks] blocks of call_bytes
  int64_t call_bytes = 0;
  int64_t has_call_number = 1;  // 0: a captured call, which the host has no number for
  uint64_t tag = 0;             // of plans on the device, as in ReplicateArgs
  int32_t bank = -1;            // of plans on the device; -1: none
  DeviceCall on_device[kMaxLaunchRanks];
};
static_assert(sizeof(LaunchArgs) <= 4096, "a kernel's arguments");

// Why a rank's device refuses its plan: in Report::wait.seen of a call that this rank rejected,
// with `expert` and, in `piece`, the flat index of the slot. Up to 4: a PlanFault.
enum class Refusal : uint64_t {
  kHome = 5,     // the plan's home map is not the group's
  kWeights = 6,  // no address of the main weights of `expert`; `piece`: the segment
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

  // Packed in a word, which is read and written whole; 0: no fault.
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
  DevicePtr<const int32_t> home = 0;           // [E]
  DevicePtr<const int32_t> domain = 0;         // [G]
  DevicePtr<const int32_t> local_begin = 0;    // [G + 1], as group_local_experts() leaves it
  DevicePtr<const int32_t> local_experts = 0;  // [E], likewise
  DevicePtr<const int32_t> load = 0;           // [sources, E]
  DevicePtr<int32_t> kept_load = 0;            // [sources, E], out: a copy; 0: none is wanted
  DevicePtr<int32_t> slot_expert = 0;          // [G, S], out, as in plan_replicas()
  DevicePtr<int32_t> slot_quota = 0;           // [G, S], out
  DevicePtr<int32_t> home_quota = 0;           // [E], out
  DevicePtr<uint64_t> fault = 0;               // of StageFaults::plan
  Objective objective;
  int32_t num_ranks = 0;
  int32_t num_experts = 0;
  int32_t slots_per_rank = 0;
  int32_t num_sources = 0;        // G, or 1: global sums
  int32_t max_local_experts = 0;  // the largest number of local experts on a rank
  int32_t allow_cross_domain = 0;
};

// Arguments of the plan kernel for a bank.
struct BankPlanArgs {
  PlanArgs plan;
  DevicePtr<const BankTable> bank = 0;
  DevicePtr<uint8_t> moves = 0;  // [G, S], out: which slots the plan has to have written
};

// A rank's plan as one piece of memory: where each part lies; from base 0, its offset.
struct PlanOutput {
  uint64_t slot_expert;  // [G, S] int32
  uint64_t slot_quota;   // [G, S] int32
  uint64_t home_quota;   // [E] int32
  int64_t bytes;

  UEC_HD static PlanOutput cut(uint64_t base, int32_t num_ranks, int32_t slots_per_rank,
                               int32_t num_experts) {
    // Aligned to 16 bytes, as compilers expect of tensors.
    const int64_t slot_bytes = round_up(int64_t{4} * num_ranks * slots_per_rank, 16);
    PlanOutput out;
    out.slot_expert = base;
    out.slot_quota = out.slot_expert + slot_bytes;
    out.home_quota = out.slot_quota + slot_bytes;
    out.bytes = 2 * slot_bytes + int64_t{4} * num_experts;
    return out;
  }
};

// Arguments of the kernel that loads and plans. A rank whose call failed has an empty plan.
struct LoadPlanArgs {
  LoadArgs load;
  PlanArgs plan;                     // without the load and the outputs, which each rank has itself
  uint64_t plans[kMaxLaunchRanks];   // [ranks] of PlanOutput, aligned to 4 bytes
  uint64_t faults[kMaxLaunchRanks];  // [ranks] of StageFaults::plan
};
static_assert(sizeof(LoadPlanArgs) <= 4096, "arguments of a kernel");

// A saved plan that a replay was about to overwrite while it was in use. Later faults are not
// written: the first explains them.
struct SaveFaultBox {
  uint64_t tag = 0;  // of the save, never 0. Written last, by publish
  uint64_t generation = 0;
};

// Faults that the host has not taken yet, in host memory that the device can address. What the
// device puts there stays until then.
struct StageFaults {
  uint64_t plan = 0;  // PlanStatus::word()
  RerouteFaultBox reroute;
  SaveFaultBox save;
};

// Words to copy, of 4 bytes.
struct SavedField {
  DevicePtr<uint32_t> to = 0;
  DevicePtr<const uint32_t> from = 0;
  int32_t count = 0;
};

// Arguments of the save kernel.
struct SaveArgs {
  static constexpr int32_t kMaxFields = 6;  // of a plan

  SavedField fields[kMaxFields] = {};
  int32_t num_fields = 0;
  // Address of the mark of an entry that a graph's replays save to, a uint64: the generation of the
  // save whose plan is in use, 0: none is. Set by the save, cleared by the plan's reduction. Null:
  // the host keeps account.
  DevicePtr<uint64_t> in_use = 0;
  uint64_t generation = 0;  // of this save; entries get later ones only. 0: clears `in_use`
  uint64_t tag = 0;         // says which save it is, for the fault
  DevicePtr<SaveFaultBox> fault = 0;
};

// What the notice kernel publishes to the peers.
enum class Notice : int64_t { kRejected = 0, kAborted = 1, kClosed = 2 };

inline constexpr int64_t kPrepareBytes = 1536;  // of PrepareShared

// Of sizes and places in the structs that the host fills: FNV-1a. The loader of a cubin compares
// it.
inline constexpr uint32_t kLayoutHash = [] {
  uint32_t hash = 2166136261;
  for (const size_t at : {
           sizeof(CallHeader),
           offsetof(CallHeader, body),
           offsetof(CallBody, arrived),
           sizeof(Status),
           offsetof(Status, report),
           sizeof(RankState),
           sizeof(Report),
           offsetof(Report, root),
           offsetof(Report, seconds),
           sizeof(LaunchArgs),
           offsetof(LaunchArgs, on_device),
           sizeof(DeviceCall),
           offsetof(DeviceCall, segments),
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
           offsetof(SharesArgs, home),
           sizeof(RerouteArgs),
           sizeof(RerouteState),
           sizeof(PlanArgs),
           sizeof(BankPlanArgs),
           offsetof(BankPlanArgs, bank),
           sizeof(LoadArgs),
           sizeof(LoadCall),
           sizeof(LoadPlanArgs),
           offsetof(LoadPlanArgs, plans),
           offsetof(Status, bad_position),
           offsetof(RankState, counts),
           offsetof(RankState, bad_id),
           offsetof(PlanArgs, objective),
           offsetof(PlanArgs, num_ranks),
           offsetof(RerouteArgs, count),
           sizeof(StageFaults),
           offsetof(StageFaults, reroute),
           offsetof(RankState, tiles_at),
           offsetof(DeviceCall, zero),
           sizeof(Reduction),
           offsetof(RankState, grad_bytes),
           offsetof(RankState, banks),
           offsetof(RankState, slot_words),
           offsetof(LaunchArgs, bank),
           sizeof(BankTable),
           sizeof(SaveArgs),
           offsetof(SaveArgs, in_use),
           offsetof(StageFaults, save),
       })
    hash = (hash ^ static_cast<uint32_t>(at)) * 16777619;
  return hash;
}();

}  // namespace uec::cuda
