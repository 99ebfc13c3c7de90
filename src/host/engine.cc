// Making an engine, submitting calls to it, waiting for them, and ending it. execute.cc runs them.
#include "host/engine.hpp"

#include <algorithm>
#include <chrono>

#include "core/base/digest.hpp"
#include "host/backoff.hpp"

namespace uec::host {
Engine::Engine(EngineConfig config)
    : config_(std::move(config)),
      layout_(config_),
      topology_(config_.topology()),
      tables_(layout_.tables(config_)),
      gone_(new std::atomic<bool>[config_.domain.size()]()),
      memory_(config_.bases.data(), config_.rank, layout_.symmetric.doorbell, gone_.get()),
      banks_(topology_, config_.num_banks),
      digest_(config_.initial_digest()) {
  if (!config_.check_bases.empty()) slot_check_ = std::make_unique<SlotCheck>(config_, layout_);
  const Capacity capacity = layout_.capacity(config_);
  for (uint64_t i = 0; i < kDepth; ++i) {
    calls_.push_back(std::make_unique<Prepared>(capacity, config_.num_workers));
    Call& call = calls_.back()->call;
    call.rank = config_.rank;
    call.num_ranks = topology_.num_ranks;
    call.layout = layout_.symmetric;
    call.addresses.bases = config_.bases.data();
    call.addresses.segment_bytes = config_.segment_bytes.data();
    call.addresses.num_local_experts = capacity.num_local_experts;
  }
  try {
    threads_->background = std::thread([this] { background_loop(); });
    for (int32_t i = 1; i < config_.num_workers; ++i)
      threads_->helpers.emplace_back([this, i] { helper_loop(i); });
  } catch (...) {
    stop_threads();
    throw;
  }
}

Engine::~Engine() { close(); }

int32_t Engine::add_region(Region region) {
  const std::lock_guard lock(submit_mutex_);
  regions_.push_back(std::move(region));
  return static_cast<int32_t>(regions_.size()) - 1;
}

// ---- submitting --------------------------------------------------------------------------------

// The storage of the next call, once the call that used it last has finished. Null: the group has
// failed or is closed, and the call ends before it begins.
Prepared* Engine::begin_call(Operation operation, const std::function<bool()>& interrupted,
                             std::unique_lock<std::mutex>& lock) {
  while (submitted_.load() - completed_.load() >= kDepth && failed_.load() == 0) {
    const uint64_t oldest = completed_.load() + 1;
    lock.unlock();
    wait(oldest, interrupted);
    lock.lock();
  }
  if (failed_.load() != 0) return nullptr;
  if (closed_) {
    report_ = {};
    report_.fault = Fault::kCancelled;
    report_.epoch = submitted_.load() + 1;
    failed_.store(report_.epoch);
    return nullptr;
  }
  Prepared* prepared = calls_[(submitted_.load() + 1) % kDepth].get();
  prepared->operation = operation;
  return prepared;
}

uint64_t Engine::enter_call(Prepared& prepared, uint64_t digest, bool background,
                            std::unique_lock<std::mutex>& lock) {
  const uint64_t epoch = submitted_.load() + 1;
  // Chained, so that two ranks that differed once cannot agree again.
  digest_ = mix(digest_, digest);
  prepared.call.epoch = {epoch, CallRecord::make(epoch, digest_, RecordKind::kCall)};
  prepared.call.reset_counters(SingleThread{});
  submitted_.store(epoch);
  calls_made_.add(prepared.operation);
  if (background) {
    background_until_.store(epoch);
    lock.unlock();
    queued_.notify_all();
  }
  return epoch;
}

std::vector<int32_t> Engine::residents(int32_t bank) const {
  const std::lock_guard lock(submit_mutex_);
  const std::vector<int32_t>& resident = banks_.residents(bank);
  return failed_.load() == 0 ? resident : std::vector<int32_t>(resident.size(), -1);
}

uint64_t Engine::version(int32_t bank) const {
  const std::lock_guard lock(submit_mutex_);
  return banks_.version(bank);
}

uint64_t Engine::last_call(int32_t bank) const {
  const std::lock_guard lock(submit_mutex_);
  return banks_.last_call(bank);
}

std::vector<uint8_t> Engine::slots_to_fill() const {
  const std::lock_guard lock(submit_mutex_);
  const int32_t slots = topology_.slots_per_rank;
  std::vector<uint8_t> to_fill(int64_t{topology_.num_ranks} * slots);
  const Prepared& last = *calls_[submitted_.load() % kDepth];
  if (last.call.epoch.number != submitted_.load() || last.operation == Operation::kGather)
    return to_fill;
  const Schedule& s = last.schedule.schedule;
  for (int32_t i = 0; i < s.first[s.num_experts]; ++i)
    to_fill[s.replica_rank[i] * slots + s.replica_slot[i]] = 1;
  return to_fill;
}

void Engine::invalidate(int32_t bank) {
  const std::lock_guard lock(submit_mutex_);
  banks_.invalidate(bank);
}

uint64_t Engine::replicate(const ReplicateArgs& given, bool background, Mode* mode,
                           const std::function<bool()>& interrupted) {
  std::unique_lock lock(submit_mutex_);
  *mode = Mode::kDirect;
  Prepared* const storage = begin_call(Operation::kReplicate, interrupted, lock);
  if (storage == nullptr) return submitted_ += 1;
  Prepared& prepared = *storage;
  Call& call = prepared.call;
  ReplicateArgs args = given;
  banks_.enter(args);
  call.addresses.slot_offset = layout_.slots_of(args.bank.index);
  const uint64_t digest = fill_call(SingleThread{}, tables_, args, prepared.arrays,
                                    prepared.schedule, &prepared.shape, &call);
  const int64_t addresses =
      static_cast<int64_t>(config_.segment_bytes.size()) * call.addresses.num_local_experts;
  for (int64_t i = 0; i < addresses; ++i)
    prepared.arrays.main_ptrs[i] = reinterpret_cast<const uint8_t*>(args.main_ptrs[i]);
  if (slot_check_ != nullptr) {
    const int64_t slots = int64_t{topology_.num_ranks} * topology_.slots_per_rank;
    prepared.slot_expert.assign(args.slot_expert, args.slot_expert + slots);
    prepared.resident.clear();
    if (args.bank.index >= 0) prepared.resident = banks_.residents(args.bank.index);
    prepared.selected.assign(config_.segment_bytes.size(), 0);
    for (int32_t i = 0; i < args.num_segments; ++i) prepared.selected[args.segments[i]] = 1;
  }
  *mode = prepared.schedule.schedule.mode;
  call.addresses.regions = nullptr;
  if (*mode == Mode::kPull) {
    const Region& region = regions_[args.region];
    call.addresses.regions = region.bases.data();
    call.addresses.region_offset = region.offset.data();
  }
  banks_.note(args, submitted_.load() + 1);
  return enter_call(prepared, digest, background, lock);
}

uint64_t Engine::reduce(const ReduceArgs& args, bool background, Mode* mode,
                        const std::function<bool()>& interrupted) {
  std::unique_lock lock(submit_mutex_);
  *mode = Mode::kDirect;
  Prepared* const storage = begin_call(Operation::kReduce, interrupted, lock);
  if (storage == nullptr) return submitted_ += 1;
  Prepared& prepared = *storage;
  const uint64_t digest = fill_call(SingleThread{}, tables_, args, prepared.arrays,
                                    prepared.schedule, &prepared.shape, &prepared.call);
  prepared.call.grads = layout_.gradients(config_, args.bank);
  const int64_t addresses =
      static_cast<int64_t>(config_.grad_bytes.size()) * layout_.num_local_experts[config_.rank];
  for (int64_t i = 0; i < addresses; ++i)
    prepared.arrays.main_ptrs[i] = reinterpret_cast<const uint8_t*>(args.main_ptrs[i]);
  *mode = prepared.schedule.schedule.mode;
  return enter_call(prepared, digest, background, lock);
}

uint64_t Engine::gather(const int32_t* row, int32_t* table, bool background,
                        const std::function<bool()>& interrupted) {
  std::unique_lock lock(submit_mutex_);
  Prepared* const storage = begin_call(Operation::kGather, interrupted, lock);
  if (storage == nullptr) return submitted_ += 1;
  Prepared& prepared = *storage;
  Worklist& work = prepared.call.work;
  work.num_tasks = work.num_pieces = work.num_reductions = 0;
  work.num_destinations = work.num_expected = 0;
  std::fill_n(work.opens, topology_.num_ranks, 0);
  std::fill_n(work.involved, topology_.num_ranks, 1);
  prepared.row = row;
  prepared.table = table;
  return enter_call(prepared, static_cast<uint64_t>(Operation::kGather), background, lock);
}

// A call's fixed parts, without the arrays of one that may be running.
Call Engine::bare_call(uint64_t epoch, CallRecord record) const {
  Call call;
  call.rank = config_.rank;
  call.num_ranks = topology_.num_ranks;
  call.epoch = {epoch, record};
  call.layout = layout_.symmetric;
  call.addresses.bases = config_.bases.data();
  return call;
}

void Engine::reject(const std::function<bool()>& interrupted) {
  if (is_inherited()) return;
  for (;;) {
    const uint64_t before = submitted_.load();
    // Calls submitted before are still owed. If one fails, the peers know of it.
    if (before > 0 && !wait(before, interrupted)) return;
    const std::lock_guard running(run_mutex_);
    std::unique_lock lock(submit_mutex_);
    if (closed_ || failed_.load() != 0) return;
    if (submitted_.load() != before) continue;  // another thread was faster
    const uint64_t epoch = before + 1;
    submitted_.store(epoch);
    calls_made_.add_rejected();
    lock.unlock();
    const Call call = bare_call(epoch, CallRecord::make(epoch, digest_, RecordKind::kRejected));
    HostMover mover;
    announce_absence(call, memory_, mover, call.epoch.record.word);
    own_record_.store(call.epoch.record.word, std::memory_order_relaxed);
    Report report;
    report.fault = Fault::kRejected;
    report.wait.peer = config_.rank;
    report_fault(call, report);
    publish_failure();
    return;
  }
}

void Engine::abort() {
  if (is_inherited()) return;
  cancel();
  const std::lock_guard running(run_mutex_);  // a running call ends first, by itself
  if (failed_.load() != 0 || closed_) return;
  // Calls that were submitted but have not run fail too: peers in them must not wait for us.
  Report report;
  report.fault = Fault::kCancelled;
  report_fault(bare_call(completed_.load() + 1, {}), report);
  publish_failure();
}

void Engine::cancel() {
  cancelled_.store(true);
  Doorbell(config_.bases[config_.rank] + layout_.symmetric.doorbell).ring();
}

// Joins the threads that were started: after a failed start there may be fewer.
void Engine::stop_threads() {
  {
    const std::lock_guard lock(submit_mutex_);  // else the background thread could miss it
    stop_background_ = true;
  }
  queued_.notify_all();
  if (threads_->background.joinable()) threads_->background.join();
  {
    const std::lock_guard running(run_mutex_);  // no call is left that could need a helper
    stop_helpers_.store(true);
    generation_.fetch_add(1);
    generation_.notify_all();
  }
  for (std::thread& helper : threads_->helpers) helper.join();
}

int32_t Engine::close() {
  if (is_inherited()) return -1;  // the goodbye is the parent's
  {
    const std::lock_guard lock(submit_mutex_);
    if (closed_) return -1;
    closed_ = true;
  }
  const uint64_t last = submitted_.load();
  if (last > 0) wait(last);
  stop_threads();
  if (failed_.load() != 0) return -1;
  const int32_t peer = find_disagreement(memory_, layout_.symmetric, last_record_);
  HostMover mover;
  const CallRecord farewell = CallRecord::farewell(last, last_record_);
  announce_absence(bare_call(last, {}), memory_, mover, farewell.word);
  own_record_.store(farewell.word, std::memory_order_relaxed);
  return peer;
}

// ---- waiting -----------------------------------------------------------------------------------

bool Engine::is_completed(uint64_t epoch) const {
  return completed_.load() >= epoch || (failed_.load() != 0 && failed_.load() <= epoch);
}

bool Engine::wait(uint64_t epoch, const std::function<bool()>& interrupted) {
  while (!is_completed(epoch)) {
    if (background_until_.load() <= completed_.load()) {
      run_next(interrupted);
      continue;
    }
    // Ours or one before it belongs to the background thread; it wakes us when it has finished.
    {
      std::unique_lock lock(submit_mutex_);
      finished_.wait_for(lock, std::chrono::milliseconds(50), [&] {
        return is_completed(epoch) || background_until_.load() <= completed_.load();
      });
    }
    // The caller is about to free what the call reads, so the call has to end first.
    if (interrupted && interrupted()) cancel();
  }
  return failed_.load() == 0 || failed_.load() > epoch;
}

bool Engine::slot_ready(uint64_t epoch, int32_t slot) const {
  const std::lock_guard lock(submit_mutex_);  // the call's arrays stay its own
  if (failed_.load() != 0 && failed_.load() <= epoch) return false;
  if (completed_.load() >= epoch) return true;
  if (submitted_.load() < epoch) return false;
  const Call& call = calls_[epoch % kDepth]->call;
  const Worklist& work = call.work;
  // Pairs with Storer::finish_task() at each sender, as Finish::step() does.
  for (int32_t i = 0; i < work.num_expected; ++i) {
    const Expected& e = work.expected[i];
    if (e.kind == Expected::kDone && e.idx == slot &&
        memory_.observe(call.layout.done(slot, e.peer)) != epoch)
      return false;
  }
  // A hub in pull is a sender of its own slot, and publishes no flag for that; see
  // Storer::finish_share().
  for (int32_t p = 0; p < work.num_pieces; ++p) {
    const Piece& piece = work.pieces[p];
    const Destination* const to = work.destinations + piece.dst_first;
    const bool is_own = std::any_of(to, to + piece.dst_count, [&](const Destination& d) {
      return d.rank == config_.rank && d.slot == slot;
    });
    if (is_own && std::atomic_ref(call.arrived[piece.task]).load(std::memory_order_acquire) !=
                      work.tasks[piece.task].num_groups)
      return false;
  }
  return true;
}

bool Engine::wait_slots(uint64_t epoch, const std::vector<int32_t>& slots,
                        const std::function<bool()>& interrupted) {
  if (background_until_.load() < epoch) return wait(epoch, interrupted);
  Backoff backoff(Doorbell(config_.bases[config_.rank] + layout_.symmetric.doorbell));
  for (size_t next = 0; next < slots.size();) {
    if (slot_ready(epoch, slots[next])) {
      ++next;
      continue;
    }
    if (failed_.load() != 0 && failed_.load() <= epoch) return false;
    if (backoff.pause() && interrupted && interrupted()) cancel();
  }
  backoff.reset();
  return true;
}

int64_t Engine::finished_at(uint64_t epoch) const {
  if (epoch == 0 || completed_.load() < epoch) return 0;
  const int64_t time = finished_at_[epoch % kKeptFinishTimes].load();
  // A call that ends while we read stores its time before it counts as completed, so check again
  // afterwards.
  return submitted_.load() < epoch + kKeptFinishTimes ? time : 0;
}

Report Engine::report() const {
  const std::lock_guard lock(submit_mutex_);
  return report_;
}

Damage Engine::damage() const {
  const std::lock_guard lock(submit_mutex_);
  return damage_;
}

PeerStates Engine::peer_states() const {
  {
    const std::lock_guard lock(submit_mutex_);
    if (!states_at_failure_.empty()) return states_at_failure_;
  }
  return read_peer_states();
}

}  // namespace uec::host
