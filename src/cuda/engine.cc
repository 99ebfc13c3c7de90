#include "cuda/engine.hpp"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <type_traits>

#include "cuda/device/config.hpp"
#include "cuda/rank_state.hpp"

namespace uec::cuda {

int64_t Engine::staging_bytes(int32_t num_sms, int64_t tile_bytes) {
  return num_sms * (kTileMemory / (kNumStages * tile_bytes)) * kNumFarStages * tile_bytes;
}

Engine::Engine(EngineConfig config, const PeerConfig& peers, std::shared_ptr<Launcher> launcher)
    : config_(std::move(config)),
      peers_(peers),
      launcher_(std::move(launcher)),
      layout_(config_),
      topology_(config_.topology()),
      tables_(layout_.tables(config_)),
      capacity_(layout_.capacity(config_)),
      banks_(topology_, config_.num_banks) {
  const int64_t tables = Launcher::tables_bytes(capacity_);
  const int64_t banks = Launcher::banks_bytes(capacity_);
  memory_.resize((tables + banks + arrays_.cut(nullptr, capacity_)) / 8);
  auto* const begin = reinterpret_cast<std::byte*>(memory_.data());
  Tables::cut(begin, capacity_, &own_tables_);
  BankTables::cut(begin + tables, capacity_, &own_banks_);
  arrays_.cut(begin + tables + banks, capacity_);
  write_state();
}

Engine::~Engine() {
  try {
    close();
  } catch (const DriverError&) {  // reported before, or there is no caller left to report to
  }
}

// What stays the same for the group's life.
void Engine::write_state() {
  auto* const begin = reinterpret_cast<std::byte*>(memory_.data());
  const Address at = launcher_->tables(config_.rank);
  RankState state = make_rank_state(config_, layout_, peers_.far, peers_.pes, own_tables_,
                                    own_banks_, at - reinterpret_cast<uint64_t>(begin));
  state.staging = peers_.staging;
  state.status = reinterpret_cast<uint64_t>(&status());
  const ContextScope current = launcher_->scope();
  const Driver& driver = launcher_->config().driver;
  copy_to_device(driver, at, begin,
                 Launcher::tables_bytes(capacity_) + Launcher::banks_bytes(capacity_));
  copy_to_device(driver, launcher_->state(config_.rank), &state, sizeof(state));
}

int32_t Engine::add_region(const std::vector<uint64_t>& bases, const std::vector<int64_t>& offset,
                           Address table) {
  const ContextScope current = launcher_->scope();
  const Driver& driver = launcher_->config().driver;
  std::vector<uint64_t> words = bases;
  words.insert(words.end(), offset.begin(), offset.end());
  copy_to_device(driver, table, words.data(), words.size() * sizeof(uint64_t));
  const std::lock_guard lock(submit_mutex_);
  regions_.push_back({std::move(words), table});
  return static_cast<int32_t>(regions_.size()) - 1;
}

// ---- submitting ---------------------------------------------------------------------------------

template <class Fill>
uint64_t Engine::submit(Fill&& fill, Handle stream, const Interrupted& interrupted) {
  const uint64_t epoch = submitted_.load() + 1;
  if (has_ended()) {
    uint64_t none = 0;
    failed_.compare_exchange_strong(none, epoch);
    return submitted_ += 1;
  }
  try {
    if (!launcher_->await_storage(config_.rank, epoch, interrupted)) {
      // Ended by another rank; otherwise the caller learns that it was interrupted.
      if (launcher_->ended(config_.rank, epoch).epoch != 0) submitted_.store(epoch);
      return epoch;
    }
    const Request request = fill(epoch);
    submitted_.store(epoch);
    calls_made_.add(request.load.load != 0 ? Operation::kGather : request.operation);
    launcher_->submit(config_.rank, epoch, request, stream);
  } catch (const DriverError&) {
    submitted_.store(epoch);
    fail_here();
    throw;
  }
  return epoch;
}

CaptureError Engine::refusal(const std::string& why) const {
  return CaptureError("rank " + std::to_string(config_.rank) + ": " + why);
}

uint64_t Engine::capture_in(Handle stream) const {
  try {
    return capture_of(launcher_->config().driver, stream);
  } catch (const CaptureError& error) {
    throw refusal(error.what());
  }
}

uint64_t Engine::submit_captured(uint64_t capture, const Request& request, Handle stream) {
  if (has_ended()) throw refusal("the group has failed; close it and create a new one");
  try {
    return launcher_->submit_captured(config_.rank, capture, request, stream);
  } catch (const CaptureError& error) {
    throw refusal(error.what());
  } catch (const DriverError& error) {  // nothing has run: the group is as it was
    throw refusal(std::string("the capture into a CUDA graph failed: ") + error.what());
  }
}

uint64_t Engine::gather(const LoadCall& load, Address plan, const PlanArgs& plan_args,
                        Handle stream, const Interrupted& interrupted) {
  const ContextScope current = launcher_->scope();
  const std::lock_guard lock(submit_mutex_);
  Request request;
  request.load = load;
  request.plan = plan;
  request.plan_args = plan_args;
  if (const uint64_t capture = capture_in(stream)) return submit_captured(capture, request, stream);
  return submit([&](uint64_t) { return request; }, stream, interrupted);
}

std::pair<int64_t, int64_t> Engine::bad_id() const {
  if (std::atomic_ref(status().failed_call).load(std::memory_order_acquire) == 0) return {-1, 0};
  return {status().bad_position, status().bad_id};
}

template <class Prepare>
uint64_t Engine::submit_from_host(Operation operation, uint64_t tag, Prepare&& prepare,
                                  const uint64_t* main_ptrs, int64_t num_local_experts,
                                  int32_t region, bool background, Handle stream,
                                  const Interrupted& interrupted, Mode* mode) {
  const ContextScope current = launcher_->scope();
  const std::lock_guard lock(submit_mutex_);
  *mode = Mode::kDirect;
  if (capture_in(stream) != 0)
    throw refusal(
        "the stream is being captured into a CUDA graph, and the plan is on the CPU: a replay would"
        " repeat it; plan from a load on the device");
  const auto fill = [&](uint64_t epoch) {
    Call call;
    arrays_.arrays.bind_arrays(&call);
    const uint64_t digest = prepare(&call);
    std::transform(main_ptrs, main_ptrs + num_local_experts, arrays_.arrays.main_ptrs,
                   [](uint64_t at) { return reinterpret_cast<const uint8_t*>(at); });
    *mode = arrays_.schedule.schedule.mode;
    const bool reads_region = operation == Operation::kReplicate && *mode == Mode::kPull;
    pack_call(call, capacity_, own_tables_, own_banks_, !peers_.far.empty(),
              reads_region ? regions_[region].words.data() : nullptr, digest,
              launcher_->block(config_.rank, epoch));
    Request request;
    request.operation = operation;
    request.tag = tag;
    request.background = background;
    return request;
  };
  return submit(fill, stream, interrupted);
}

uint64_t Engine::replicate(const ReplicateArgs& args, bool background, Handle stream,
                           const Interrupted& interrupted, Mode* mode) {
  const auto prepare = [&](Call* call) {
    note_call(-1, 0, nullptr, submitted_.load() + 1, 0);
    if (args.bank.index >= 0) banks_.set_version(args.bank.index, args.bank.version);  // no slots
    return fill_call(SingleThread{}, tables_, args, arrays_.arrays, arrays_.schedule, &shape_,
                     call);
  };
  return submit_from_host(Operation::kReplicate, args.tag, prepare, args.main_ptrs, num_addresses(),
                          args.region, background, stream, interrupted, mode);
}

uint64_t Engine::reduce(const ReduceArgs& args, bool background, Handle stream,
                        const Interrupted& interrupted, Mode* mode) {
  const auto prepare = [&](Call* call) {
    return fill_call(SingleThread{}, tables_, args, arrays_.arrays, arrays_.schedule, &shape_,
                     call);
  };
  return submit_from_host(Operation::kReduce, args.tag, prepare, args.main_ptrs,
                          num_grad_addresses(), -1, background, stream, interrupted, mode);
}

uint64_t Engine::submit_from_device(Request request, const char* missing, const uint64_t* main_ptrs,
                                    int64_t num_local_experts, Handle stream,
                                    const Interrupted& interrupted) {
  if (const uint64_t capture = capture_in(stream)) {
    if (request.device.main_ptrs == 0 && num_local_experts > 0) throw refusal(missing);
    return submit_captured(capture, request, stream);
  }
  const auto fill = [&](uint64_t epoch) {
    if (main_ptrs == nullptr) return request;
    std::byte* const block = launcher_->block(config_.rank, epoch);
    std::copy_n(main_ptrs, num_local_experts, reinterpret_cast<uint64_t*>(block + kHeaderBytes));
    request.device.main_ptrs = launcher_->device_block(config_.rank, epoch) + kHeaderBytes;
    request.main_ptrs_bytes = num_local_experts * static_cast<int64_t>(sizeof(uint64_t));
    return request;
  };
  return submit(fill, stream, interrupted);
}

uint64_t Engine::replicate_on_device(const DeviceReplicateArgs& args, bool background,
                                     Handle stream, const Interrupted& interrupted) {
  const ContextScope current = launcher_->scope();
  const std::lock_guard lock(submit_mutex_);
  Request request;
  request.tag = args.tag;
  request.bank = args.bank;
  request.background = background;
  request.device = {.slot_expert = args.slot_expert,
                    .slot_quota = args.slot_quota,
                    .home_quota = args.home_quota,
                    .home = args.home,
                    .main_ptrs = args.table,
                    .region_at = args.region < 0 ? 0 : regions_[args.region].table,
                    .segments = args.segments,
                    .mode = static_cast<int8_t>(args.mode),
                    .region = static_cast<int16_t>(args.region)};
  const bool is_other = args.bank >= 0 && args.version != banks_.version(args.bank);
  const bool is_refused = args.table == 0 && num_addresses() > 0 && capture_in(stream) != 0;
  if (is_other && !has_ended() && !is_refused)
    set_version(args.bank, args.version, stream, interrupted);
  const uint64_t call = submit_from_device(
      request,
      "the stream is being captured into a CUDA graph, and the addresses of the weights are not"
      " on the device; bind them with group.bind() before the capture and pass what it returns",
      args.main_ptrs, num_addresses(), stream, interrupted);
  note_call(args.bank, args.segments, args.known, call, capture_in(stream));
  return call;
}

uint64_t Engine::reduce_on_device(const DeviceReduceArgs& args, bool background, Handle stream,
                                  const Interrupted& interrupted) {
  const ContextScope current = launcher_->scope();
  const std::lock_guard lock(submit_mutex_);
  Request request;
  request.operation = Operation::kReduce;
  request.tag = args.tag;
  request.bank = args.bank;
  request.background = background;
  request.device = {.slot_expert = args.slot_expert,
                    .slot_quota = args.slot_quota,
                    .home_quota = args.home_quota,
                    .home = args.home,
                    .main_ptrs = args.table,
                    .in_use = args.in_use,
                    .segments = args.main_types,
                    .mode = static_cast<int8_t>(args.mode),
                    .zero = static_cast<int8_t>(args.zero)};
  return submit_from_device(
      request,
      "the stream is being captured into a CUDA graph, and the addresses of the gradients are not"
      " on the device; bind them with group.bind_grads() before the capture and pass what it"
      " returns",
      args.main_ptrs, num_grad_addresses(), stream, interrupted);
}

// ---- banks --------------------------------------------------------------------------------------

Address Engine::on_device(const void* own) const {
  const auto at = reinterpret_cast<uint64_t>(own) - reinterpret_cast<uint64_t>(memory_.data());
  return launcher_->tables(config_.rank) + at;
}

uint64_t Engine::version(int32_t bank) const {
  const std::lock_guard lock(submit_mutex_);
  return banks_.version(bank);
}

std::vector<int32_t> Engine::residents(int32_t bank, Handle stream,
                                       const Interrupted& interrupted) {
  const ContextScope current = launcher_->scope();
  const std::lock_guard lock(submit_mutex_);
  std::vector<int32_t> resident(capacity_.replicas(), -1);
  if (has_ended()) return resident;
  if (banks_.is_known(bank)) return banks_.residents(bank);
  if (capture_in(stream) != 0)
    throw refusal(
        "the stream is being captured into a CUDA graph, and what a bank holds is read by the host;"
        " plan with a load on the device, or before the capture");
  // Replays are on the caller's stream, if anywhere.
  const Driver& driver = launcher_->config().driver;
  const uint64_t last = submitted_.load();
  if (!launcher_->await_stream(stream, interrupted)) return resident;
  if (last > 0 && !synchronize(last, interrupted)) return resident;
  BankTable table;
  const Handle own_stream = launcher_->config().stream;
  copy_from_device(driver, &table, on_device(own_banks_.tables + bank), sizeof(table), own_stream);
  if (table.segments != 0)
    copy_from_device(driver, resident.data(), reinterpret_cast<Address>(table.resident),
                     resident.size() * sizeof(int32_t), own_stream);
  banks_.learn(bank, table.version, table.segments, resident);
  return resident;
}

void Engine::note_call(int32_t bank, uint64_t segments, const int32_t* slot_expert, uint64_t call,
                       uint64_t capture) {
  if (capture == 0) bank_of_[call % Launcher::kDepth] = std::max(bank, 0);
  banks_.note_on_device(bank, segments, slot_expert, call, capture);
}

bool Engine::follow_calls(int32_t bank, uint64_t capture, Handle stream,
                          const Interrupted& interrupted) {
  const uint64_t last = banks_.last_call(bank, capture);
  return last == 0 || wait(last, stream, interrupted);
}

Address Engine::bank_table(int32_t bank, Handle stream, const Interrupted& interrupted) {
  const ContextScope current = launcher_->scope();
  const std::lock_guard lock(submit_mutex_);
  if (!has_ended()) follow_calls(bank, capture_in(stream), stream, interrupted);
  return on_device(own_banks_.tables + bank);
}

void Engine::set_version(int32_t bank, uint64_t version, Handle stream,
                         const Interrupted& interrupted) {
  const uint64_t capture = capture_in(stream);
  if (!follow_calls(bank, capture, stream, interrupted)) return;
  const Driver& driver = launcher_->config().driver;
  const auto set = [&](size_t offset, uint64_t value) {
    for (const uint64_t half : {value & 0xFFFFFFFF, value >> 32}) {
      require(driver,
              driver.cuMemsetD32Async(on_device(own_banks_.tables + bank) + offset,
                                      static_cast<unsigned>(half), 1, stream),
              "cuMemsetD32Async");
      offset += 4;
    }
  };
  set(offsetof(BankTable, segments), 0);
  set(offsetof(BankTable, version), version);
  banks_.set_version(bank, version, capture);
}

void Engine::invalidate(int32_t bank, Handle stream, const Interrupted& interrupted) {
  const ContextScope current = launcher_->scope();
  const std::lock_guard lock(submit_mutex_);
  if (!has_ended()) set_version(bank, banks_.version(bank) + 1, stream, interrupted);
}

// ---- ending -------------------------------------------------------------------------------------

void Engine::fail_here() {
  const uint64_t from = launcher_->end(config_.rank, Fault::kCancelled, false);
  uint64_t none = 0;
  failed_.compare_exchange_strong(none, from);
}

void Engine::reject() {
  if (launcher_->is_inherited()) return;
  const bool alone = launcher_->config().num_ranks == 1;
  // Calls submitted before are still owed. If one fails, the peers know of it.
  if (alone && submitted_.load() > 0 && !synchronize(submitted_.load(), {})) return;
  const std::lock_guard lock(submit_mutex_);
  if (has_ended()) return;
  calls_made_.add_rejected();
  failed_.store(launcher_->end(config_.rank, Fault::kRejected, true));
  // Ranks of a shared launch learn of it where they wait for the launch.
  if (alone) launcher_->notify(config_.rank, Notice::kRejected);
}

void Engine::abort() {
  if (launcher_->is_inherited() || has_ended()) return;
  // A kernel that waits for a peer sees this, and ends; so does a thread that waits for a launch.
  std::atomic_ref(status().cancelled).store(1, std::memory_order_release);
  launcher_->end(config_.rank, Fault::kCancelled, false);
  const std::lock_guard lock(submit_mutex_);
  try {
    launcher_->notify(config_.rank, Notice::kAborted);
  } catch (const DriverError&) {
    fail_here();
    throw;
  }
  if (failed_epoch() == 0) fail_here();
}

int32_t Engine::close() {
  if (launcher_->is_inherited()) return -1;
  if (closed_.exchange(true)) return -1;
  const uint64_t last = submitted_.load();
  const bool ok = last == 0 || synchronize(last, {});
  const std::lock_guard lock(submit_mutex_);
  launcher_->end(config_.rank, Fault::kClosed, true);
  if (!ok || failed_epoch() != 0) {
    // Kernels already launched end by themselves, and use the memory until then.
    for (uint64_t call = last; call > 0; --call) {
      if (!launcher_->launched(call)) continue;
      launcher_->await_done(call, {});
      break;
    }
    launcher_->await_replays();
    report();  // while the memory that tells it is there
    return -1;
  }
  launcher_->notify(config_.rank, Notice::kClosed);
  return static_cast<int32_t>(std::atomic_ref(status().disagreement).load());
}

// ---- waiting ------------------------------------------------------------------------------------

bool Engine::has_ended() const { return closed_.load() || failed_epoch() != 0; }

uint64_t Engine::failed_epoch() const {
  const uint64_t on_device = std::atomic_ref(status().failed_call).load(std::memory_order_acquire);
  if (on_device != 0) return on_device;
  if (const uint64_t here = failed_.load(); here != 0) return here;
  return launcher_->ended(config_.rank, submitted_.load()).epoch;
}

bool Engine::succeeded(uint64_t epoch) const {
  const uint64_t failed = failed_epoch();
  return failed == 0 || failed > epoch;
}

bool Engine::is_completed(uint64_t epoch) { return launcher_->done(epoch) || !succeeded(epoch); }

bool Engine::await_launch(uint64_t epoch, const Interrupted& interrupted) {
  if (launcher_->await_launch(config_.rank, epoch, interrupted)) return true;
  if (succeeded(epoch)) fail_here();  // interrupted: the caller is about to free what it lent
  return false;
}

bool Engine::wait(uint64_t epoch, Handle stream, const Interrupted& interrupted) {
  if (!succeeded(epoch)) return false;
  if (!await_launch(epoch, interrupted)) return false;
  try {
    launcher_->order(epoch, stream);
  } catch (const CaptureError& error) {
    throw refusal(error.what());
  }
  return true;
}

Address Engine::ready(int32_t bank) const {
  return on_device(own_banks_.ready + int64_t{bank} * topology_.slots_per_rank);
}

bool Engine::wait_slots(uint64_t epoch, const std::vector<int32_t>& slots, Handle stream,
                        const Interrupted& interrupted) {
  if (!succeeded(epoch)) return false;
  if (!await_launch(epoch, interrupted)) return false;
  const ContextScope current = launcher_->scope();
  const std::lock_guard lock(submit_mutex_);
  if (capture_in(stream) != 0)
    throw refusal("wait(slots=) in a capture into a CUDA graph; wait for the whole call");
  if (epoch + Launcher::kDepth <= submitted_.load()) return true;  // its storage is used again
  const Driver& driver = launcher_->config().driver;
  constexpr unsigned kAtLeast = 0;    // CU_STREAM_WAIT_VALUE_GEQ
  const uint64_t wanted = epoch + 1;  // as in ready.cuh
  // A wait for a value is no order that the driver knows of: it could put the wait into a hardware
  // queue ahead of what the kernel waits for.
  launcher_->order_behind_start(epoch, stream);
  for (const int32_t slot : slots)
    require(driver,
            driver.cuStreamWaitValue64(
                stream, ready(bank_of_[epoch % Launcher::kDepth]) + slot * sizeof(uint64_t), wanted,
                kAtLeast),
            "cuStreamWaitValue64");
  return true;
}

bool Engine::synchronize(uint64_t epoch, const Interrupted& interrupted) {
  if (!await_launch(epoch, interrupted)) return false;
  if (!launcher_->await_done(epoch, interrupted)) {
    std::atomic_ref(status().cancelled).store(1, std::memory_order_release);
    launcher_->await_done(epoch, {});
  }
  return succeeded(epoch);
}

Report Engine::report() const {
  const std::lock_guard lock(report_mutex_);
  if (report_.epoch != 0) return report_;
  const bool on_device = std::atomic_ref(status().failed_call).load(std::memory_order_acquire) != 0;
  Report report = on_device ? status().report
                            : launcher_->ended(config_.rank, std::max(epoch(), failed_.load()));
  if (report.epoch == 0) {
    report.fault = Fault::kCancelled;
    report.epoch = failed_.load();
    return report;
  }
  if (report.root >= 0) return report;
  states_at_failure_ = await_root(config_.rank, &report, [&] { return read_peer_states(report); });
  report_ = report;
  return report;
}

PeerStates Engine::peer_states() const {
  const std::lock_guard lock(report_mutex_);
  return states_at_failure_;
}

// Only this rank's own memory is read, where the peers' devices have put what they say: no peer has
// to be alive for that. A copy has no order with their stores, and needs none: the low half of an
// abort word says all that the chain is made of, and what has not arrived is read again. If reading
// fails, this rank's own report is all that is known.
PeerStates Engine::read_peer_states(const Report& own) const {
  const SymmetricLayout& layout = layout_.symmetric;
  const size_t ranks = config_.bases.size();
  constexpr size_t kLineWords = kFlagLine / sizeof(uint64_t);
  std::vector<uint64_t> records(ranks * kLineWords), aborts(ranks);
  try {
    const ContextScope current = launcher_->scope();
    const auto read = [&](std::vector<uint64_t>& words, int64_t offset) {
      copy_from_device(launcher_->config().driver, words.data(),
                       reinterpret_cast<Address>(config_.bases[config_.rank]) + offset,
                       words.size() * sizeof(uint64_t), launcher_->config().stream);
    };
    read(records, layout.call_base);
    read(aborts, layout.abort_base);
  } catch (const DriverError&) {  // the caller has an error to report already
  }
  PeerStates states(ranks);
  for (size_t r = 0; r < ranks; ++r)
    states[r] = {
        .record = {records[r * kLineWords]},
        .abort = {aborts[r]},
        .reached = config_.bases[r] != nullptr || (!peers_.far.empty() && peers_.far[r] != 0)};
  PeerState& self = states[config_.rank];
  const bool rejected = own.fault == Fault::kRejected && own.wait.peer == config_.rank;
  self.record =
      CallRecord::make(own.epoch, 0, rejected ? RecordKind::kRejected : RecordKind::kCall);
  // A call that was never launched, because of another rank that shares the launches.
  if (!self.abort.set()) self.abort = abort_word(config_.rank, own);
  return states;
}

int64_t Engine::bytes_stored() const {
  const ContextScope current = launcher_->scope();
  uint64_t bytes = 0;
  copy_from_device(launcher_->config().driver, &bytes,
                   launcher_->state(config_.rank) + offsetof(RankState, bytes_stored),
                   sizeof(bytes), launcher_->config().stream);
  return static_cast<int64_t>(bytes);
}

}  // namespace uec::cuda
