// Launching the local stages of one rank: the plan of a load, its save, and the reroute of ids or
// of a map. The host sees none of their data and waits for none of their launches, so that all of
// them can be captured into a graph.
//
// Order: launches of one rank use the same working memory, so each comes after the one before it,
// on whichever stream. That order does not cross the boundary of a capture, since a graph runs
// again: the captured launches follow each other, and the caller's streams have to order a replay
// with what runs before and after it on the same rank. While two captures alternate on one rank,
// the caller's streams also have to order the launches inside each.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "cuda/device/args.hpp"
#include "cuda/device/plan_block.hpp"
#include "cuda/driver.hpp"
#include "engine/process.hpp"

namespace uec::cuda {

// A rank as the stages' kernels see it. Its arrays are in host memory, and must not change.
class StageShape {
 public:
  StageShape(int32_t rank, int32_t slots_per_rank, std::vector<int32_t> home,
             std::vector<int32_t> domain, bool allow_cross_domain, int32_t warp_size);

  int32_t rank;
  int32_t slots_per_rank;
  std::vector<int32_t> home;    // [E]
  std::vector<int32_t> domain;  // [G]
  bool allow_cross_domain;
  int32_t warp_size;                   // of the device
  std::vector<int32_t> local_begin;    // [G + 1] as group_local_experts() leaves it
  std::vector<int32_t> local_experts;  // [E] likewise
  int32_t max_local_experts = 0;       // the largest number of local experts on a rank

  int32_t num_ranks() const { return static_cast<int32_t>(domain.size()); }
  int32_t num_experts() const { return static_cast<int32_t>(home.size()); }
  Topology topology() const;
  RerouteShape reroute(int32_t max_runs = 0) const;

  // Blocks have as many warps as on a device whose warps have 32 threads.
  int64_t plan_shared_bytes(int32_t num_warps) const;
  int64_t bank_plan_shared_bytes(int32_t num_warps) const;
  int64_t shares_shared_bytes() const;
  int64_t reroute_shared_bytes() const;
  int32_t runs_of_ids(int64_t num_ids) const;
  int32_t runs_of_map(int64_t num_tokens) const;
  int64_t state_bytes(int32_t max_runs) const;
  // home [E], domain [G], local_begin [G + 1], local_experts [E]: what the plan kernel is given.
  int64_t constants_bytes() const;

  RerouteGrid grid_of_ids(int64_t num_ids) const;
  RerouteGrid grid_of_map(int64_t num_tokens) const;
  RerouteGrid grid_of_shares() const;
};

struct StageKernels {
  Handle plan = nullptr;           // ultraep_plan
  Handle plan_in_bank = nullptr;   // ultraep_plan_in_bank
  Handle shares = nullptr;         // ultraep_reroute_shares
  Handle reroute_int32 = nullptr;  // ultraep_reroute_int32
  Handle reroute_int64 = nullptr;  // ultraep_reroute_int64
  Handle reroute_map = nullptr;    // ultraep_reroute_map
  Handle save_plan = nullptr;      // ultraep_save_plan
};

// Addresses on the device, as PlanArgs and BankPlanArgs have them.
struct PlanCall {
  Address load = 0;
  Address kept_load = 0;
  Address slot_expert = 0;
  Address slot_quota = 0;
  Address home_quota = 0;
  int32_t num_sources = 0;
  Objective objective;
  Address bank = 0;   // 0: the plan is from empty slots
  Address moves = 0;  // of a bank
};

// Addresses on the device, as SharesArgs and RerouteArgs have them.
struct RerouteCall {
  Address load = 0;
  Address slot_expert = 0;
  Address slot_quota = 0;
  Address home_quota = 0;
  Address home = 0;    // 0: the plan is of the group's own home map
  int32_t source = 0;  // rank whose tokens they are
  Routing routing = Routing::kNone;
  Address from = 0;
  Address to = 0;
  int64_t count = 0;
  int32_t element_bytes = 0;  // of an id, or of a probability
  Address probs = 0;
  Address physical_probs = 0;
  Address instances = 0;
};

// Memory is the caller's, and kept until the stages are gone.
class Stages {
 public:
  // constants: constants_bytes() of device memory. faults: page-locked, zeroed, at the same address
  // on the device.
  Stages(const Driver& driver, Handle context, StageShape shape, const StageKernels& kernels,
         int32_t num_plan_warps, int32_t num_bank_plan_warps, Address constants,
         StageFaults* faults);
  ~Stages();  // waits as await_idle() does
  Stages(const Stages&) = delete;
  Stages& operator=(const Stages&) = delete;

  const StageShape& shape() const { return shape_; }

  // Working memory for up to `max_runs` blocks: state_bytes(max_runs), zeroed, for all launches
  // from now on. Earlier launches, and graphs, keep using what they were given.
  void bind_state(Address state, int32_t max_runs);
  int32_t max_runs() const { return max_runs_; }

  void plan(const PlanCall& call, Handle stream);
  // The rank's part of PlanArgs: all but the load and the plan.
  PlanArgs plan_args(const Objective& objective) const;
  // Launches both kernels each time: a replay may have overwritten the shares with another plan's.
  void reroute(const RerouteCall& call, Handle stream);

  // The caller fills all of `args` except the fault.
  void save_plan(SaveArgs args, Handle stream);

  bool is_capturing(Handle stream) const;
  // Whether graphs may hold any of the launches.
  bool has_captured() const {
    const std::lock_guard lock(mutex_);
    return capture_ != 0;
  }
  // Whether the launches outside captures have finished.
  bool is_idle() const;
  // Waits until they have. False: `interrupted`.
  template <class Interrupted>
  bool await_idle(Interrupted&& interrupted) const {
    while (!is_idle()) {
      if (interrupted()) return false;
      pause();
    }
    return true;
  }

  // The faults that launches have reported since the last call of this.
  StageFaults take_faults();

  LaunchCounts counts() const {
    const std::lock_guard lock(mutex_);
    return counts_;
  }

 private:
  static void pause();
  uint64_t begin(Handle stream);
  void end(uint64_t capture, Handle stream);
  void launch(Handle kernel, int32_t num_blocks, int32_t num_threads, int64_t shared_bytes,
              void* args, Handle stream);
  Handle make_event() const;

  Process maker_;
  Driver driver_;
  Handle context_;
  StageShape shape_;
  StageKernels kernels_;
  int32_t num_plan_warps_, num_bank_plan_warps_;
  Address constants_;
  StageFaults* faults_;

  mutable std::mutex mutex_;
  Address state_ = 0;
  int32_t max_runs_ = 0;
  Handle used_ = nullptr;      // event after the last launch outside captures
  Handle captured_ = nullptr;  // and inside one
  bool is_used_ = false;
  uint64_t capture_ = 0;  // that `captured_` was recorded in; 0: none
  LaunchCounts counts_;
};

}  // namespace uec::cuda
