#include "simulation/ranks.hpp"

namespace sim {
namespace {

using uec::CallRecord;
using uec::Fault;
using uec::RecordKind;
using uec::Report;
using uec::Step;

constexpr uint64_t kFirstDigest = 0x123456789ABCDEF;

}  // namespace

Simulation::Simulation(const Case& c) : case_(c), arena_(size_t{16} << 20) {
  const PlanCase& g = case_.group;
  main_idx_ = g.local_idx();
  num_local_experts_ = g.num_local_experts();

  Shape shape{};
  shape.num_ranks = g.num_ranks;
  shape.num_experts = g.num_experts;
  shape.slots_per_rank = g.slots_per_rank;
  shape.max_local_experts = *std::max_element(num_local_experts_.begin(), num_local_experts_.end());
  shape.agents_per_rank = workers() + 1;
  shape.tile_bytes = case_.tile_bytes;
  shape.segment_bytes = case_.segment_bytes;
  shape.slot_offset.resize(case_.segment_bytes.size());
  int64_t tiles = 0, region = 0;
  for (const int64_t bytes : case_.segment_bytes) {
    tiles += uec::ceil_div(bytes, case_.tile_bytes);
    shape.region_offset.push_back(region);
    region = uec::round_up(region + shape.max_local_experts * bytes, uec::kSegmentAlign);
  }
  shape.grad_bytes = case_.grad_bytes;
  shape.grad_type = case_.grad_type;
  shape.main_grad_type = case_.main_grad_type;
  grad_offset_.resize(case_.grad_bytes.size());
  int64_t grads_end = 0;
  for (size_t i = 0; i < case_.grad_bytes.size(); ++i) {
    shape.main_grad_offset.push_back(grads_end);
    grads_end += shape.max_local_experts * main_grad_bytes(i);
  }
  const uec::Gradients grads{static_cast<int32_t>(case_.grad_bytes.size()), case_.grad_bytes.data(),
                             case_.grad_type.data(), grad_offset_.data()};
  const int64_t finest = uec::TileMap::tiles_per_group(case_.tile_bytes);
  shape.layout = uec::SymmetricLayout::make(
      g.topology(), shape.max_local_experts, uec::ceil_div(tiles, finest),
      static_cast<int32_t>(case_.segment_bytes.size()), case_.segment_bytes.data(),
      shape.slot_offset.data(), grads, case_.tile_bytes, grad_offset_.data());
  shape.grad_offset = grad_offset_;
  shape.max_messages = num_calls() + 3;
  shape.row_bytes = int64_t{4} * g.num_experts;

  std::vector<std::vector<uint64_t>> records(g.num_ranks);
  for (int32_t r = 0; r < g.num_ranks; ++r) {
    bases_.push_back(base_of(Space::kSymmetric, r));
    regions_.push_back(base_of(Space::kMains, r));
    main_weights_.emplace_back();
    for (size_t i = 0; i < case_.segment_bytes.size(); ++i)
      for (int32_t m = 0; m < num_local_experts_[r]; ++m)
        main_weights_.back().push_back(regions_.back() + shape.region_offset[i] +
                                       m * case_.segment_bytes[i]);
    main_grads_.emplace_back();
    for (size_t i = 0; i < case_.grad_bytes.size(); ++i)
      for (int32_t m = 0; m < num_local_experts_[r]; ++m)
        main_grads_.back().push_back(base_of(Space::kMainGrads, r) + shape.main_grad_offset[i] +
                                     m * main_grad_bytes(i));
    const uec::GroupTables tables{
        g.topology(), r, case_.segment_bytes.data(), main_idx_.data(), case_.tile_bytes, {}, grads};
    rank_calls_.emplace_back();
    uint64_t digest = kFirstDigest;
    SimBank bank(g);
    for (int32_t i = 0; i < num_calls(); ++i) {
      const bool differs =
          case_.ending == Ending::kDisagrees && r == case_.culprit && i == case_.at_call;
      const CallSpec& spec = differs ? case_.other : case_.calls[i];
      rank_calls_[r].push_back(
          std::make_unique<RankCall>(case_, tables, spec, case_.first_epoch + i, digest, bank));
      const RankCall& made = *rank_calls_[r].back();
      const int32_t reductions = made.work.num_reductions;
      digest = made.digest;
      records[r].push_back(made.record.word);
      max_pieces_ = std::max({max_pieces_, made.work.num_pieces, reductions});
      shape.max_tasks = std::max({shape.max_tasks, made.work.num_tasks, reductions});
    }
  }
  max_pieces_ = std::max(max_pieces_, 1);
  shape.max_tasks = std::max(shape.max_tasks, 1);

  const size_t agents = static_cast<size_t>(g.num_ranks) * shape.agents_per_rank;
  ranks_ = arena_.array<Rank>(g.num_ranks);
  worker_states_ = arena_.array<WorkerState>(agents);
  calls_ = arena_.array<uec::Call>(g.num_ranks);
  clock_ran_out_ = arena_.array<uint64_t>(1);
  sent_ = arena_.array<uint8_t>(g.num_ranks * g.num_ranks);
  uec::StripeScratch none;
  scratch_bytes_ = uec::StripeScratch::cut(nullptr, g.num_ranks, max_pieces_, &none);
  scratch_ = arena_.array<std::byte>(agents * scratch_bytes_);
  worker_objects_ = arena_.array<Worker>(agents);
  reducers_ = arena_.array<Reducer>(has_grads() ? agents : 0);
  finishes_ = arena_.array<Finish>(g.num_ranks);
  gathers_ = arena_.array<Gather>(g.num_ranks);
  memories_ = arena_.array<SimMemory>(agents);
  movers_ = arena_.array<SimMover>(agents);
  adders_ = arena_.array<SimAdder>(agents);
  held_ = arena_.array<uec::UnpublishedGroup>(agents * uec::kMaxUnpublished);
  world_ = std::make_unique<World>(shape, arena_);
  world_->records = std::move(records);
  for (int32_t a = 0; a < static_cast<int32_t>(agents); ++a) {
    new (&memories_[a]) SimMemory(*world_, a);
    new (&movers_[a]) SimMover(*world_, a, case_.eager_delivery);
    new (&adders_[a]) SimAdder(*world_, a);
    worker_states_[a] = {1, 1, 1, 1, 0, 0};
  }

  // The group has made calls before: flags hold what they left, also an epoch that agrees with the
  // first one in its low 32 bits.
  const uint64_t before = case_.first_epoch - 1;
  const uint64_t left =
      case_.first_epoch >> 32 != 0 ? case_.first_epoch - (uint64_t{1} << 32) : before;
  const CallRecord last =
      before == 0 ? CallRecord{} : CallRecord::make(before, kFirstDigest, RecordKind::kCall);
  const uec::SymmetricLayout& layout = world_->shape.layout;
  for (int32_t r = 0; r < g.num_ranks; ++r) {
    ranks_[r].last = last;
    for (int32_t peer = 0; peer < g.num_ranks; ++peer) {
      if (peer != r) world_->leave_behind(r, layout.call(peer), last.word);
      world_->leave_behind(r, layout.open(peer), last.word);
      world_->leave_behind(r, layout.gathered(peer), left);
      for (int32_t s = 0; s < g.slots_per_rank; ++s)
        world_->leave_behind(r, layout.done(s, peer), left);
      for (int32_t m = -g.slots_per_rank; m < shape.max_local_experts; ++m)
        world_->leave_behind(r, layout.pulled(m, peer), left);
    }
    for (int32_t s = 0; s < g.slots_per_rank; ++s)
      for (int64_t i = 0; i < layout.max_groups; ++i)
        world_->leave_behind(r, layout.ready(s, i), left);
    for (int32_t peer = 0; peer < g.num_ranks && has_grads(); ++peer)
      for (int32_t s = 0; s < g.slots_per_rank; ++s)
        world_->leave_behind(r, layout.consumed(s, peer), left);
    for (int32_t m = 0; m < shape.max_local_experts && has_grads(); ++m)
      for (int64_t i = 0; i < layout.max_grad_groups; ++i)
        world_->leave_behind(r, layout.summed(m, i), left);
    write_main_ptrs(r, 0, true);
  }
}

// ---- workers -----------------------------------------------------------------------------------

void Simulation::step_worker(int32_t agent, bool fetch) {
  const int32_t rank = world_->rank_of(agent);
  Rank& r = ranks_[rank];
  WorkerState& state = worker_states_[agent];
  Worker& worker = worker_objects_[agent];
  Reducer& reducer = reducers_[agent];
  const int32_t side = fetch ? 0 : 1;
  world_->rang = false;
  // Other workers of a failed rank continue until they look.
  if (draining(r) && !state.noticed && world_->roll(2) == 0) {
    state.noticed = 1;
    world_->wake_agent(agent);
  }
  if (draining(r) && state.noticed) {
    const Step drained = state.reduces ? reducer.drain_step() : worker.drain_step();
    if (drained == Step::kProgress) return;
    sleep(agent, side);
    if (drained != Step::kFinished) return;
    state.drained = 1;
    world_->wake_agent(own_thread(rank));
    return;
  }
  world_->in_store = !fetch || state.reduces;
  const Step step = state.reduces ? reducer.step()
                    : fetch       ? worker.fetch_step()
                                  : worker.store_step();
  world_->in_store = false;
  if (fetch) state.blocked = 0;
  switch (step) {
    case Step::kProgress:
      world_->wake_agent(agent);
      return;
    case Step::kFailed:
      state.noticed = 1;
      world_->wake_agent(agent);
      fail(rank,
           uec::report_step(memories_[agent], calls_[rank],
                            state.reduces ? reducer.fault() : worker.fault(), wait_of(agent)));
      return;
    case Step::kWaitsForPeer:
      if (draining(r))
        state.noticed = 1;
      else
        blocked(agent, wait_of(agent));
      return;
    case Step::kAwaitDelivered:
    case Step::kNeedsFetch:
      sleep(agent, side);
      if (!fetch) world_->asleep[2 * agent] = 0;  // a stage may have become free
      return;
    case Step::kFinished:
      if (fetch && !state.reduces) {
        state.fetched = 1;
        world_->wake_agent(agent);
      } else {
        state.stored = 1;
        world_->wake_agent(own_thread(rank));
      }
      sleep(agent, side);
  }
}

uec::Wait Simulation::wait_of(int32_t agent) {
  return worker_states_[agent].reduces ? reducers_[agent].wait() : worker_objects_[agent].wait();
}

// Nothing can be done before a flag changes. Every publish wakes its reader, so that the sleeper
// need not look again before.
void Simulation::blocked(int32_t agent, const uec::Wait& wait) {
  const int32_t rank = world_->rank_of(agent);
  const Report report = uec::report_step(memories_[agent], calls_[rank], Fault::kNone, wait);
  if (report.fault == Fault::kAborted) {
    fail(rank, report);
    return;
  }
  worker_states_[agent].blocked = 1;
  // A doorbell that rang between the look and here keeps the sleeper awake.
  if (!world_->rang) sleep(agent, 0);
}

void Simulation::time_out(int32_t agent) {
  const int32_t rank = world_->rank_of(agent);
  Report report;
  report.fault = Fault::kTimeout;
  report.wait = agent != own_thread(rank)                   ? wait_of(agent)
                : spec(rank, ranks_[rank].call).spec.gather ? gathers_[rank].wait()
                                                            : finishes_[rank].wait();
  report.all_called = uec::all_called(memories_[agent], calls_[rank]);
  *clock_ran_out_ = 1;
  fail(rank, report);
}

// ---- a rank's own thread -----------------------------------------------------------------------

void Simulation::step_program(int32_t rank) {
  Rank& r = ranks_[rank];
  SimMemory& memory = memories_[own_thread(rank)];
  SimMover& mover = movers_[own_thread(rank)];
  world_->rang = false;
  switch (r.phase) {
    case Phase::kEnter:
      if (r.call == num_calls())
        close(rank);
      else
        enter(rank);
      return;
    case Phase::kAnnounce:
      announce_call(calls_[rank], memory, mover);
      r.last = calls_[rank].epoch.record;
      r.phase = Phase::kStart;
      return;
    case Phase::kStart:
      start_workers(rank);
      r.phase = Phase::kOpen;
      return;
    case Phase::kOpen:
      announce_open(calls_[rank], memory, mover);
      r.phase = Phase::kWork;
      return;
    case Phase::kWork:
      wait_for_workers(rank);
      return;
    case Phase::kFinish:
      step_end(rank);
      return;
    case Phase::kReturn:
      give_back(rank);
      return;
    case Phase::kAbort:
      announce_abort(calls_[rank], memory, mover, uec::abort_word(rank, r.report));
      r.phase = Phase::kDrain;
      return;
    case Phase::kDrain:
      drain(rank);
      return;
    case Phase::kChain:
      if (r.gave_up || uec::chain_is_written(peer_states(rank), r.report.epoch, rank))
        r.phase = Phase::kSettle;
      else if (!world_->rang)
        sleep(own_thread(rank), 0);
      return;
    case Phase::kSettle:
      settle(rank);
      return;
    case Phase::kClosed:
    case Phase::kFailed:
      return;
  }
}

void Simulation::enter(int32_t rank) {
  Rank& r = ranks_[rank];
  const RankCall& made = spec(rank, r.call);
  const int32_t own = own_thread(rank);
  world_->call_now[rank] = r.call;
  r.began = 0;
  uec::Call& call = *new (&calls_[rank]) uec::Call;
  call.rank = rank;
  call.num_ranks = case_.group.num_ranks;
  call.epoch = {case_.first_epoch + r.call, made.record};
  call.layout = world_->shape.layout;
  call.tiles = made.tiles;
  call.addresses = {
      .bases = bases_.data(),
      .segment_bytes = world_->shape.segment_bytes.data(),
      .slot_offset = world_->shape.slot_offset.data(),
      .main_ptrs = made.spec.reduce ? main_grads_[rank].data() : main_weights_[rank].data(),
      .num_local_experts = num_local_experts_[rank],
      .regions = made.spec.mode == uec::Mode::kPull ? regions_.data() : nullptr,
      .region_offset = world_->shape.region_offset.data()};
  call.work = made.work;
  if (made.spec.reduce) {
    call.grads = made.reduction->call.grads;
    call.main_type = made.reduction->call.main_type;
  }
  call.arrived = world_->arrived(rank);

  Report early = uec::check_peers(memories_[own], call.layout, call.epoch, r.last);
  if (early.fault == Fault::kNone && case_.ending == Ending::kRejects && rank == case_.culprit &&
      r.call == case_.at_call) {
    early.fault = Fault::kRejected;
    early.wait.peer = rank;
    const uint64_t word =
        CallRecord::make(call.epoch.number, kFirstDigest, RecordKind::kRejected).word;
    announce_absence(call, memories_[own], movers_[own], word);
  }
  if (early.fault != Fault::kNone) {
    fail(rank, early);
    return;
  }
  if (made.spec.gather) {
    world_->write_now(own, world_->row_cell(rank), row(rank, r.call));
    for (int32_t peer = 0; peer < call.num_ranks; ++peer)
      world_->write_now(own, world_->table_cell(rank, peer), poison(r.call));
    new (&gathers_[rank]) Gather(call, memories_[own], movers_[own],
                                 reinterpret_cast<const int32_t*>(base_of(Space::kRow, rank)),
                                 case_.group.num_experts, sent_ + rank * call.num_ranks);
  } else {
    new (&finishes_[rank]) Finish(call, memories_[own]);
  }
  r.began = 1;
  r.phase = Phase::kAnnounce;
}

// After the caller's last use of the slots. Nothing may be taken for new that an earlier call left.
void Simulation::start_workers(int32_t rank) {
  const int32_t own = own_thread(rank);
  uec::Call& call = calls_[rank];
  const RankCall& prepared = spec(rank, ranks_[rank].call);
  const CallSpec& made = prepared.spec;
  if (made.gather) return;
  if (made.reduce) write_gradients(rank, ranks_[rank].call);
  for (int32_t s = 0; s < case_.group.slots_per_rank && !made.reduce; ++s)
    for (int32_t tile = 0; tile < world_->num_tiles(); ++tile)
      if (!holds_resident(prepared, rank, s))
        world_->write_now(own, world_->slot_cell(rank, s, tile), poison(ranks_[rank].call));
  call.reset_counters(uec::SingleThread{});
  world_->reset_arrivals(rank);
  const bool moves = call.work.num_pieces + call.work.num_reductions > 0;
  for (int32_t w = 0; w < workers() && moves; ++w) {
    const int32_t agent = agent_of(rank, w);
    world_->join(agent, own);
    new (&movers_[agent]) SimMover(*world_, agent, case_.eager_delivery);
    uec::StripeScratch scratch;
    uec::StripeScratch::cut(scratch_ + agent * scratch_bytes_, call.num_ranks, max_pieces_,
                            &scratch);
    const uec::Stripe stripe{w, workers()};
    if (made.reduce)
      new (&reducers_[agent]) Reducer(call, memories_[agent], adders_[agent], scratch,
                                      held_ + agent * uec::kMaxUnpublished, stripe);
    else
      new (&worker_objects_[agent]) Worker(call, memories_[agent], movers_[agent], scratch, stripe);
    worker_states_[agent] = {};
    worker_states_[agent].reduces = made.reduce;
    world_->wake_agent(agent);
  }
}

void Simulation::wait_for_workers(int32_t rank) {
  for (int32_t w = 0; w < workers(); ++w)
    if (!worker_states_[agent_of(rank, w)].stored) {
      sleep(own_thread(rank), 0);
      return;
    }
  for (int32_t w = 0; w < workers(); ++w) world_->join(own_thread(rank), agent_of(rank, w));
  ranks_[rank].phase = Phase::kFinish;
}

void Simulation::step_end(int32_t rank) {
  const int32_t own = own_thread(rank);
  const bool gather = spec(rank, ranks_[rank].call).spec.gather;
  const Step step = gather ? gathers_[rank].step() : finishes_[rank].step();
  worker_states_[own].blocked = 0;
  if (step == Step::kProgress) return;
  const uec::Wait& wait = gather ? gathers_[rank].wait() : finishes_[rank].wait();
  if (step == Step::kFailed)
    fail(rank, uec::report_step(memories_[own], calls_[rank],
                                gather ? gathers_[rank].fault() : finishes_[rank].fault(), wait));
  else if (step == Step::kWaitsForPeer)
    blocked(own, wait);
  else if (step == Step::kAwaitDelivered)
    sleep(own, 0);
  else
    ranks_[rank].phase = Phase::kReturn;
}

void Simulation::give_back(int32_t rank) {
  Rank& r = ranks_[rank];
  if (!world_->quiet(rank))
    world_->violate(Property::kMissedFault, "rank %d finished call %d with operations under way",
                    rank, r.call);
  if (case_.ending == Ending::kDisagrees && met_mismatch(rank))
    world_->violate(Property::kMissedFault, "rank %d finished call %d, and a partner's differs",
                    rank, r.call);
  if (spec(rank, r.call).spec.reduce) {
    check_gradients(rank);
    spoil_slot_gradients(rank, true);
  } else {
    check_bytes(rank);
  }
  write_main_ptrs(rank, r.call + 1, true);
  ++r.call;
  r.phase = Phase::kEnter;
}

void Simulation::close(int32_t rank) {
  Rank& r = ranks_[rank];
  const int32_t own = own_thread(rank);
  const int32_t peer = uec::find_disagreement(memories_[own], world_->shape.layout, r.last);
  if (peer >= 0) {
    r.report.fault = Fault::kMismatch;
    check_report(rank);
  }
  const uint64_t word = CallRecord::farewell(case_.first_epoch + num_calls() - 1, r.last).word;
  announce_absence(calls_[rank], memories_[own], movers_[own], word);
  r.phase = Phase::kClosed;
}

// ---- failing -----------------------------------------------------------------------------------

// The first fault of a rank is the one that is reported.
void Simulation::fail(int32_t rank, const Report& report) {
  if (ranks_[rank].phase >= Phase::kAbort) return;
  ranks_[rank].report = report;
  ranks_[rank].report.epoch = calls_[rank].epoch.number;
  ranks_[rank].phase = Phase::kAbort;
  world_->wake_rank(rank);
}

void Simulation::drain(int32_t rank) {
  const int32_t own = own_thread(rank);
  const RankCall& made = spec(rank, ranks_[rank].call);
  bool drained =
      !made.spec.gather || !ranks_[rank].began || gathers_[rank].drain_step() == Step::kFinished;
  for (int32_t w = 0; w < workers(); ++w) {
    const WorkerState& state = worker_states_[agent_of(rank, w)];
    drained &= state.drained || state.stored;
  }
  if (!drained || !memories_[own].flags_delivered()) {
    sleep(own, 0);
    return;
  }
  ranks_[rank].phase = Phase::kChain;
}

uec::PeerStates Simulation::peer_states(int32_t rank) const {
  const uec::SymmetricLayout& layout = world_->shape.layout;
  SimMemory& memory = memories_[own_thread(rank)];
  uec::PeerStates states(case_.group.num_ranks);
  for (int32_t r = 0; r < case_.group.num_ranks; ++r)
    states[r] = {
        {memory.observe(layout.call(r))}, {memory.observe(layout.abort(r))}, memory.peer_gone(r)};
  return states;
}

void Simulation::settle(int32_t rank) {
  uec::name_root(peer_states(rank), rank, &ranks_[rank].report);
  check_report(rank);
  if (!world_->quiet(rank))
    world_->violate(Property::kMainsChanged, "rank %d gave up with operations under way", rank);
  world_->freed[rank] = 1;
  write_main_ptrs(rank, 0, false);
  spoil_slot_gradients(rank, false);
  ranks_[rank].phase = Phase::kFailed;
}

}  // namespace sim
