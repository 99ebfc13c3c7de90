// The ranks of a case, as programs over a world: what each step of each worker does, what may
// happen next, and what has to hold.
//
// The core's own templates run here: Worker, Reducer, Gather, Finish, and what failure.hpp decides.
// A rank's program does what an engine does around them: it starts the workers, waits for them,
// gives a call back to its caller, and ends a call that has failed.
#pragma once

#include <new>
#include <vector>

#include "core/transfer/gather.hpp"
#include "core/transfer/reducer.hpp"
#include "core/transfer/worker.hpp"
#include "engine/cause.hpp"
#include "simulation/adder.hpp"
#include "simulation/case.hpp"
#include "simulation/world.hpp"

namespace sim {

struct Transition {
  enum Kind : uint8_t {
    kFetch,      // of agent: also a reducer's one side
    kStore,      // of agent
    kProgram,    // of rank: its own thread
    kOperation,  // number in the world's list
    kShow,       // flag
    kStop,       // rank
    kNotice,     // observer * num_ranks + rank
    kGiveUp,     // rank: ends its wait for other ranks' abort words
    kTimeout,    // agent: its wait has expired
  } kind;
  int32_t index;
};

class Simulation {
 public:
  explicit Simulation(const Case& c);

  // What may happen next; nothing: everything has ended.
  void list(std::vector<Transition>& out);
  void take(const Transition& t);
  // Leaves of a list what has to be tried for every schedule to be like one that was: where a
  // thread can do nothing that others could see or change, its steps come first, in all their
  // orders.
  void reduce(std::vector<Transition>& possible) const;
  // Ends a schedule that list() has nothing more for.
  void check_end();

  World& world() { return *world_; }
  const Case& simulated() const { return case_; }
  Property violation() const { return world_->violation; }
  int32_t lead() const;  // calls between the fastest rank and the slowest
  // What waits that expired were for, in all schedules: a bit for each kind of flag.
  uint32_t timed_out() const { return timed_out_; }

  std::vector<uint8_t> save() const {
    return {arena_.bytes(), arena_.bytes() + world_->live_bytes()};
  }
  void restore(const std::vector<uint8_t>& state) {
    std::memcpy(arena_.bytes(), state.data(), state.size());
    world_->violation = Property::kNone;
  }

 private:
  using Worker = uec::Worker<SimMemory, SimMover>;
  using Reducer = uec::Reducer<SimMemory, SimAdder>;
  using Finish = uec::Finish<SimMemory>;
  using Gather = uec::Gather<SimMemory, SimMover>;

  enum class Phase : int32_t {
    kEnter,     // between two calls
    kAnnounce,  // in the call, but the caller still uses the slots
    kStart,     // from here on workers run: as on a device, where any block may be first
    kOpen,
    kWork,    // waits for its workers
    kFinish,  // waits for its peers
    kReturn,  // the call has succeeded
    kAbort,   // the call has failed: its peers are to be told
    kDrain,   // waits for what is under way, and for the abort to be delivered
    kChain,   // waits for the others' words
    kSettle,  // the caller has its weights back
    kClosed,
    kFailed,
  };

  struct Rank {
    Phase phase;
    int32_t call;
    int32_t began;  // the present call got past its first checks
    int32_t stopped, gave_up;
    uec::CallRecord last;
    uec::Report report;
  };
  struct WorkerState {
    int32_t fetched, stored;  // its side has finished
    int32_t noticed;          // that its rank has failed
    int32_t drained;
    int32_t blocked;  // its last word was that a peer has to move first
    int32_t reduces;  // it is a reducer
  };

  int32_t workers() const { return case_.num_workers; }
  int32_t agent_of(int32_t rank, int32_t worker) const { return rank * (workers() + 1) + worker; }
  int32_t own_thread(int32_t rank) const { return agent_of(rank, workers()); }
  bool has_grads() const { return !case_.grad_bytes.empty(); }
  int64_t main_grad_bytes(size_t segment) const {
    return case_.grad_bytes[segment] / uec::bytes_of(case_.grad_type[segment]) *
           uec::bytes_of(case_.main_grad_type[segment]);
  }
  int32_t num_calls() const { return static_cast<int32_t>(case_.calls.size()); }
  const RankCall& spec(int32_t rank, int32_t call) const { return *rank_calls_[rank][call]; }
  bool working(const Rank& r) const { return r.phase >= Phase::kOpen && r.phase <= Phase::kReturn; }
  bool draining(const Rank& r) const {
    return r.phase >= Phase::kAbort && r.phase <= Phase::kDrain;
  }
  bool stops_somebody() const {
    return case_.ending == Ending::kStops || case_.ending == Ending::kDies;
  }
  bool can_time_out(int32_t agent) const;

  void step_worker(int32_t agent, bool fetch);
  void step_program(int32_t rank);
  void enter(int32_t rank);
  void start_workers(int32_t rank);
  uec::Wait wait_of(int32_t agent);
  void wait_for_workers(int32_t rank);
  void step_end(int32_t rank);
  void give_back(int32_t rank);
  void fail(int32_t rank, const uec::Report& report);
  void time_out(int32_t agent);
  void drain(int32_t rank);
  uec::PeerStates peer_states(int32_t rank) const;
  void settle(int32_t rank);
  void close(int32_t rank);
  void blocked(int32_t agent, const uec::Wait& wait);
  void sleep(int32_t agent, int32_t side) { world_->asleep[2 * agent + side] = 1; }

  bool holds_resident(const RankCall& made, int32_t rank, int32_t slot) const;
  Content payload(int32_t call, int32_t expert, int32_t tile) const;
  Content poison(int32_t call) const { return {0xDEAD0000u + static_cast<uint64_t>(call), 1}; }
  Content row(int32_t rank, int32_t call) const;
  Content slot_grad(int32_t call, int32_t expert, int32_t rank, int32_t tile) const;
  Content main_grad(int32_t call, int32_t expert, int32_t tile) const;
  Content reduced(const RankCall& made, int32_t call, int32_t expert, int32_t tile) const;
  void write_gradients(int32_t rank, int32_t call);
  void spoil_slot_gradients(int32_t rank, bool checked);
  void check_gradients(int32_t rank);
  void write_main_ptrs(int32_t rank, int32_t call, bool checked);
  void check_bytes(int32_t rank);
  void check_report(int32_t rank);
  bool may_wait_for(int32_t rank, uec::FlagKind flag) const;
  bool met_mismatch(int32_t rank) const;

  Case case_;
  std::vector<std::vector<std::unique_ptr<RankCall>>> rank_calls_;  // [rank][call]
  std::vector<int32_t> main_idx_, num_local_experts_;
  std::vector<int64_t> grad_offset_;
  std::vector<uint8_t*> bases_;
  std::vector<const uint8_t*> regions_;
  std::vector<std::vector<const uint8_t*>> main_weights_;  // [rank][segments * M]
  std::vector<std::vector<const uint8_t*>> main_grads_;    // [rank][gradients' segments * M]
  Arena arena_;
  std::unique_ptr<World> world_;

  // In the arena.
  Rank* ranks_;
  WorkerState* worker_states_;  // [agents]
  uec::Call* calls_;            // [ranks] the one under way
  uint64_t* clock_ran_out_;
  uint8_t* sent_;                // [ranks][ranks]
  std::byte* scratch_;           // [agents][scratch_bytes_]
  Worker* worker_objects_;       // [agents]
  Reducer* reducers_;            // [agents]
  Finish* finishes_;             // [ranks]
  Gather* gathers_;              // [ranks]
  SimMemory* memories_;          // [agents]
  SimMover* movers_;             // [agents]
  SimAdder* adders_;             // [agents]
  uec::UnpublishedGroup* held_;  // [agents][kMaxUnpublished]: the reducers'
  int32_t max_pieces_ = 1;
  int64_t scratch_bytes_ = 0;
  uint32_t timed_out_ = 0;  // not in the arena
};

}  // namespace sim
