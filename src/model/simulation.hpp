// One transfer on a described machine: the production workers of all ranks, step by step, under a
// modelled clock.
//
// Stripes, polling, skipping, the ring and the flags are those of the core; only the layer below
// them is modelled. Workers sleep until something happens that may concern them.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <stdexcept>
#include <vector>

#include "core/transfer/announce.hpp"
#include "core/transfer/reducer.hpp"
#include "core/transfer/worker.hpp"
#include "model/policies.hpp"
#include "model/world.hpp"

namespace uec::model {

// What all ranks do, in arrays that the caller owns. Ranks enter the call at time 0.
struct Job {
  std::vector<Call> calls;  // [G]
  int32_t slots_per_rank = 0;
};

// What an agent, a worker of a rank, is made of.
struct Context {
  World& world;
  const Call& call;
  ModelMemory& memory;
  Spent& spent;
  int32_t id;  // among all workers
  const StripeScratch& scratch;
  int64_t* received;  // [G][S]
  int32_t* held;      // of the rank: stages in use
  int64_t* idle_since;

  Stripe stripe() const { return {id % world.machine().workers, world.machine().workers}; }
};

struct Outcome {
  std::vector<int64_t> finish;                     // [G] when a rank's call ends
  std::vector<int64_t> egress_busy, ingress_busy;  // [G]
  std::vector<int64_t> sent;                       // [G] bytes
  std::vector<int64_t> received;                   // [G][S] bytes
  std::vector<Span> spans;
};

// An Agent has two sides, each with a step, as Worker has, and is notified when its copies have
// arrived.
template <class Agent>
class Simulation {
 public:
  Simulation(const Machine& machine, const Job& job, bool keeps_spans)
      : machine_(machine),
        job_(job),
        num_ranks_(static_cast<int32_t>(job.calls.size())),
        world_(machine, num_ranks_, job.calls[0].layout.slots_base, keeps_spans),
        ranks_(num_ranks_) {
    const size_t workers = static_cast<size_t>(num_ranks_) * machine.workers;
    outcome_.finish.resize(num_ranks_);
    outcome_.received.resize(static_cast<size_t>(num_ranks_) * job.slots_per_rank);
    due_flag_.resize(workers);
    workers_.reserve(workers);
    for (int32_t r = 0; r < num_ranks_; ++r) {
      Rank& rank = ranks_[r];
      rank.memory = std::make_unique<ModelMemory>(world_, r, spent_);
      rank.num_working = machine.workers;
    }
    for (int32_t w = 0; w < static_cast<int32_t>(workers); ++w)
      workers_.push_back(std::make_unique<State>(*this, w));
  }

  // Throws std::logic_error if ranks wait for each other forever, which would be a bug in the core
  // or in the job.
  Outcome run() {
    for (int32_t r = 0; r < num_ranks_; ++r) {
      ModelPublisher publisher;
      announce_call(job_.calls[r], *ranks_[r].memory, publisher);
      announce_open(job_.calls[r], *ranks_[r].memory, publisher);
    }
    for (int32_t w = 0; w < static_cast<int32_t>(workers_.size()); ++w) wake(w);
    run_due();
    while (!world_.ended()) {
      const int64_t time = world_.next_time();
      while (!world_.ended() && world_.next_time() == time) handle(world_.take());
      run_due();
    }
    for (const Rank& rank : ranks_)
      if (!rank.finished) throw std::logic_error("a modelled transfer does not end");
    outcome_.egress_busy = std::move(world_.egress_busy);
    outcome_.ingress_busy = std::move(world_.ingress_busy);
    outcome_.sent = std::move(world_.sent);
    outcome_.spans = std::move(world_.spans);
    return std::move(outcome_);
  }

 private:
  struct Rank {
    std::unique_ptr<ModelMemory> memory;
    std::unique_ptr<Finish<ModelMemory>> finish;
    int32_t num_working = 0;  // workers
    int32_t held = 0;         // stages
    int64_t idle_since = 0;
    bool finished = false;
  };

  struct State {
    State(Simulation& s, int32_t w)
        : rank(s.world_.rank_of(w)),
          memory(cut(nullptr, s)),
          agent({s.world_, s.job_.calls[rank], *s.ranks_[rank].memory, s.spent_, w,
                 (cut(memory.data(), s), scratch), s.outcome_.received.data(), &s.ranks_[rank].held,
                 &s.ranks_[rank].idle_since}) {}
    int64_t cut(std::byte* base, const Simulation& s) {
      const Worklist& work = s.job_.calls[rank].work;
      return StripeScratch::cut(base, s.num_ranks_, max32(work.num_pieces, work.num_reductions),
                                &scratch);
    }

    int32_t rank;
    StripeScratch scratch;
    std::vector<std::byte> memory;
    Agent agent;
    bool fetched = false, ended = false;
    int64_t fetch_free = 0, store_free = 0;  // when a side may take its next step
  };

  void wake(int32_t w) {
    if (due_flag_[w] || workers_[w]->ended) return;
    due_flag_[w] = 1;
    due_.push_back(w);
  }

  void wake_all(int32_t r) {
    for (int32_t w = 0; w < machine_.workers; ++w) wake(r * machine_.workers + w);
  }

  void handle(const Event& event) {
    switch (event.kind) {
      case EventKind::kLoaded:
        workers_[event.who]->agent.note_loaded(static_cast<uint32_t>(event.what));
        return wake(event.who);
      case EventKind::kDelivered:
        workers_[event.who]->agent.note_delivered(static_cast<uint32_t>(event.what));
        return wake(event.who);
      case EventKind::kFlag:
        return note_flag(event);
      case EventKind::kFree:
        return wake(event.who);
      default:
        return;
    }
  }

  void note_flag(const Event& event) {
    const int32_t r = event.who;
    world_.flag(r, event.what) = event.value;
    const SymmetricLayout& layout = job_.calls[r].layout;
    const auto is_in = [&](int64_t begin, int64_t end) {
      return event.what >= begin && event.what < end;
    };
    if (ranks_[r].num_working == 0)
      finish(r);
    else if (is_in(layout.ready_base, layout.pulled_base) ||
             is_in(layout.summed_base, layout.consumed_base))
      wake(r * machine_.workers + Agent::waiter(job_.calls[r], machine_.workers, event.what));
    else if (event.what < layout.done_base || event.what >= layout.consumed_base)
      wake_all(r);
  }

  void run_due() {
    while (!due_.empty()) {
      const int32_t w = due_.front();
      due_.pop_front();
      due_flag_[w] = 0;
      run_worker(w);
    }
  }

  void run_worker(int32_t w) {
    State& state = *workers_[w];
    const int32_t r = state.rank;
    if (state.ended) return;
    // The store side first: it gives back stages.
    const Step stored = take_step(w, state.store_free, [&] { return state.agent.store_step(); });
    const Step fetched = take_step(w, state.fetch_free, [&] { return state.agent.fetch_step(); });
    if (stored == Step::kFailed || fetched == Step::kFailed)
      throw std::logic_error("a modelled transfer fails");
    const bool ends = fetched == Step::kFinished && !state.fetched;  // the store side will see it
    state.fetched = fetched == Step::kFinished;
    // Workers that are due at the same moment take steps in turns, as they run in parallel on a
    // device: one that filled all its stages first would hold groups that others could send sooner.
    if (stored == Step::kProgress || fetched == Step::kProgress || ends) wake(w);
    if (stored == Step::kFinished) {
      state.ended = true;
      if (--ranks_[r].num_working == 0) finish(r);
    }
  }

  // A step of a side of a worker, unless it is busy until `free`.
  template <class F>
  Step take_step(int32_t w, int64_t& free, F&& step) {
    const int64_t now = world_.now();
    if (now < free) return Step::kNeedsFetch;
    spent_ = {.counts = true};
    const Step taken = step();
    free = now + spent_.ps;
    if (free > now) world_.schedule(free, EventKind::kFree, w, 0, 0);
    return taken;
  }

  void finish(int32_t r) {
    Rank& rank = ranks_[r];
    if (rank.finished) return;
    const Call& call = job_.calls[r];
    if (!rank.finish) rank.finish = std::make_unique<Finish<ModelMemory>>(call, *rank.memory);
    Step step;
    do step = rank.finish->step();
    while (step == Step::kProgress);
    if (step == Step::kFailed) throw std::logic_error("a modelled transfer fails");
    if (step != Step::kFinished) return;
    rank.finished = true;
    const int64_t now = outcome_.finish[r] = world_.now() + machine_.finish_ps;
    world_.note({r, SpanKind::kWait, -1, -1, -1, rank.idle_since, now, 0});
    world_.note({r, SpanKind::kCall, -1, -1, -1, 0, now, 0});
  }

  const Machine machine_;
  const Job& job_;
  int32_t num_ranks_;
  World world_;
  Spent spent_;
  std::vector<Rank> ranks_;
  std::vector<std::unique_ptr<State>> workers_;
  std::vector<uint8_t> due_flag_;
  std::deque<int32_t> due_;
  Outcome outcome_;
};

// Streams tiles of experts.
class TransferAgent {
 public:
  explicit TransferAgent(const Context& c)
      : mover_(c.world, c.call, c.id, c.received, c.held, c.idle_since, c.spent),
        worker_(c.call, c.memory, mover_, c.scratch, c.stripe()) {}

  // The worker that the flag at an offset is for.
  static int32_t waiter(const Call& call, int32_t workers, int64_t flag) {
    for (int32_t p = 0; p < call.work.num_pieces; ++p) {
      const Piece& piece = call.work.pieces[p];
      const int64_t group = (flag - call.layout.ready(~piece.source_idx, 0)) / 8;
      if (piece.source == Source::kSlot && group >= piece.begin && group < piece.end)
        return Stripe{0, workers}.owner(p, static_cast<int32_t>(group));
    }
    return 0;
  }

  Step store_step() { return worker_.store_step(); }
  Step fetch_step() { return worker_.fetch_step(); }
  void note_loaded(uint32_t k) { mover_.note_loaded(k); }
  void note_delivered(uint32_t k) { mover_.note_delivered(k); }

 private:
  ModelMover mover_;
  Worker<ModelMemory, ModelMover> worker_;
};

// Adds gradients: the store side only says when it has ended.
class ReductionAgent {
 public:
  explicit ReductionAgent(const Context& c)
      : adder_(c.world, c.call, c.id, c.spent),
        reducer_(c.call, c.memory, adder_, c.scratch, unpublished_, c.stripe()) {}

  static int32_t waiter(const Call& call, int32_t workers, int64_t flag) {
    for (int32_t p = 0; p < call.work.num_reductions; ++p) {
      const Reduction& r = call.work.reductions[p];
      const int64_t group = (flag - call.layout.summed(r.local_idx, 0)) / 8;
      if (r.of_hub && group >= r.begin && group < r.end)
        return Stripe{0, workers}.owner(ReductionPieces::list(call, p),
                                        static_cast<int32_t>(group));
    }
    return 0;
  }

  Step store_step() const { return ended_ ? Step::kFinished : Step::kNeedsFetch; }
  Step fetch_step() {
    const Step step = reducer_.step();
    ended_ |= step == Step::kFinished;
    return step;
  }
  void note_loaded(uint32_t tile) { adder_.note_loaded(tile); }
  void note_delivered(uint32_t) { adder_.note_added(); }

 private:
  UnpublishedGroup unpublished_[kMaxUnpublished] = {};
  ModelAdder adder_;
  Reducer<ModelMemory, ModelAdder> reducer_;
  bool ended_ = false;
};

}  // namespace uec::model
