// The CUDA engine's host half over a driver that only records its calls.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "cuda/device/block.hpp"
#include "cuda/device/tables.hpp"
#include "cuda/engine.hpp"
#include "engine_ranks.hpp"
#include "host/prepared.hpp"

namespace {

using namespace engine_tests;

// What the device gets is what the host engine would have prepared.
void check_block(const Ranks& ranks, const PlanCase& plan, int32_t rank, const std::byte* block) {
  EngineConfig config = ranks.config;
  config.rank = rank;
  const EngineLayout layout(config);
  const uec::GroupTables tables = layout.tables(config);
  const uec::Capacity capacity = layout.capacity(config);
  uec::host::Prepared expected(capacity, 1);
  const uint64_t digest =
      uec::fill_call(uec::SingleThread{}, tables, ranks.args(plan), expected.arrays,
                     expected.schedule, &expected.shape, &expected.call);
  const auto& header = *reinterpret_cast<const CallHeader*>(block);
  const uec::Worklist& work = expected.call.work;
  CHECK(header.digest == digest);
  uec::CallBody found = header.body;
  uec::cuda::place_arrays(uec::SingleThread{}, found, header.pointers, block,
                          const_cast<std::byte*>(block));
  const uec::Addresses& to = found.addresses;
  CHECK(to.regions == nullptr);
  CHECK(to.far == nullptr);
  CHECK_EQ(found.work.num_tasks, work.num_tasks);
  CHECK_EQ(found.work.num_pieces, work.num_pieces);
  CHECK_EQ(found.work.num_destinations, work.num_destinations);
  CHECK_EQ(found.work.num_expected, work.num_expected);
  CHECK_EQ(found.tiles.num_segments, 2);
  CHECK_EQ(found.tiles.tile_bytes, config.tile_bytes);
  CHECK_EQ(found.tiles.group_tiles, expected.call.tiles.group_tiles);
  CHECK(std::equal(config.bases.begin(), config.bases.end(), to.bases));
  CHECK(std::equal(config.segment_bytes.begin(), config.segment_bytes.end(), to.segment_bytes));
  CHECK(std::equal(layout.slots_of(0), layout.slots_of(1), to.slot_offset));
  const auto same = [](const auto* a, const auto* b, int64_t count) {
    return std::memcmp(a, b, count * sizeof(*a)) == 0;
  };
  CHECK(same(found.work.tasks, work.tasks, work.num_tasks));
  for (int32_t i = 0; i < work.num_pieces; ++i) {  // all but the padding
    const uec::Piece &a = found.work.pieces[i], &b = work.pieces[i];
    CHECK(std::memcmp(&a, &b, offsetof(uec::Piece, sets_ready)) == 0);
    CHECK(a.sets_ready == b.sets_ready);
  }
  CHECK(same(found.work.destinations, work.destinations, work.num_destinations));
  CHECK(same(found.work.expected, work.expected, work.num_expected));
  CHECK(same(found.work.opens, work.opens, capacity.num_ranks));
  CHECK(same(found.work.involved, work.involved, capacity.num_ranks));
  CHECK(same(found.work.needs, work.needs, capacity.num_ranks));
  CHECK(same(found.tiles.bytes, expected.arrays.bytes, 2));
  CHECK(same(found.tiles.first_tile, expected.arrays.first_tile, 3));
  CHECK(same(found.tiles.segment, expected.arrays.segment, 2));
  for (int32_t i = 0; i < 2 * capacity.num_local_experts; ++i)
    CHECK(reinterpret_cast<uint64_t>(to.main_ptrs[i]) == ranks.main_ptrs[i]);
  for (int32_t i = 0; i < work.num_tasks; ++i) CHECK_EQ(found.arrived[i], 0);
}

void check_state() {
  const PlanCase plan = make_plan();
  Ranks ranks(plan, 1, 1);
  const RankState& state = ranks.state(1);
  const EngineLayout layout(ranks.config);
  CHECK_EQ(state.rank, 1);
  CHECK_EQ(state.num_ranks, 3);
  CHECK_EQ(state.capacity.num_local_experts, layout.num_local_experts[1]);
  CHECK_EQ(state.layout.total, layout.symmetric.total);
  CHECK(state.digest == ranks.config.initial_digest());
  CHECK_EQ(state.epoch, 0);
  CHECK_EQ(state.call_limit_ns, 60'000'000'000);
  CHECK_EQ(state.wait_limit_ns, 2'500'000'000);
  CHECK_EQ(state.far.address, 0);
  CHECK_EQ(state.pes.address, 0);
  for (int32_t r = 0; r < 3; ++r) CHECK(state.bases[r] == ranks.config.bases[r]);
  for (int32_t e = 0; e < ranks.config.num_experts; ++e) CHECK_EQ(state.counts[e], 0);
  for (int32_t i = 0; i < 2; ++i) {
    CHECK_EQ(state.segment_bytes[i], ranks.config.segment_bytes[i]);
    for (int32_t bank = 0; bank < 2; ++bank) {
      const auto* const row = uec::cuda::BankTables::row(state.offsets, state.capacity, bank);
      CHECK_EQ(row[i], layout.slots_of(bank)[i]);
      CHECK_EQ(row[2 + i], layout.grad_offset[i]);  // both banks'
    }
  }
  CHECK(state.status == &ranks.launcher->status(1));
}

// A call that blocks its stream runs on that stream; nothing is waited for.
void check_in_place() {
  const PlanCase plan = make_plan();
  for (int32_t rank = 0; rank < 3; ++rank) {
    Ranks ranks(plan, rank, 1);
    CHECK_EQ(ranks.call(0, plan, false), 1);
    const std::vector<std::string> log = recorder::take_log();
    CHECK_EQ(log.size(), 3);
    const int64_t bytes = uec::cuda::call_block_bytes(ranks.capacity());
    CHECK(log[0] == "copy " + std::to_string(bytes) + on(kUserStream));
    CHECK(log[1] == "launch" + on(kUserStream));
    CHECK(log[2].starts_with("record ") && log[2].ends_with(on(kUserStream)));
    const recorder::Launch launch = recorder::state().launches.back();
    CHECK(launch.kernel == recorder::kKernel);
    CHECK(launch.together);  // blocks wait for each other
    CHECK_EQ(launch.grid[0], kNumSms);
    CHECK_EQ(launch.grid[1], 1);
    CHECK_EQ(launch.block[0], 64 * uec::kMaxBlockWorkers);
    CHECK_EQ(launch.shared_bytes,
             uec::cuda::shared_bytes(ranks.capacity(), 16 << 10, uec::kMaxBlockWorkers));
    CHECK(launch.args.states.address == ranks.launcher->state(rank));
    CHECK_EQ(launch.args.call_bytes, bytes);
    check_block(ranks, plan, rank, launch.args.calls);
    // Later work on the stream follows the call anyway; work on other streams does not.
    const auto other = reinterpret_cast<Handle>(8);
    CHECK(ranks.engines[0]->wait(1, kUserStream, {}));
    CHECK(ranks.engines[0]->wait(1, other, {}));
    const std::string done = log[2].substr(7, log[2].find(" on ") - 7);
    CHECK(recorder::take_log() == std::vector<std::string>{"wait for " + done + on(other)});
    CHECK(ranks.engines[0]->synchronize(1, {}));
    CHECK(ranks.engines[0]->is_completed(1));
    // There is nothing to wait for after a call has finished.
    CHECK(ranks.engines[0]->wait(1, kUserStream, {}));
    CHECK(recorder::take_log().empty());
  }
}

// How many blocks a multiprocessor holds depends on what their kernel takes, when it is launched.
void check_residency() {
  const PlanCase plan = make_plan();
  const Ranks ranks(plan, 0, 1);
  uec::cuda::LauncherConfig config = ranks.launcher->config();
  int32_t workers = uec::kMaxBlockWorkers;
  recorder::state().occupancy = [&](Handle kernel, int32_t threads, size_t shared) {
    const bool reduces = kernel == recorder::kReduce;
    CHECK_EQ(threads, 32 * (reduces ? uec::kReduceWarps : 2 * workers));
    CHECK_EQ(shared, reduces
                         ? uec::cuda::reduce_shared_bytes(config.capacity)
                         : uec::cuda::shared_bytes(config.capacity, config.tile_bytes, workers));
    return reduces ? 2 : 3;
  };
  CHECK_EQ(Launcher::blocks_per_multiprocessor(config), 2);
  config.num_sms = 64;  // a rank has 128 workers at most
  workers = 2;
  CHECK_EQ(Launcher::blocks_per_multiprocessor(config), 2);
  config.num_sms = kNumSms;
  config.tile_bytes *= 2;  // half as many fit
  workers = 2;
  CHECK_EQ(Launcher::blocks_per_multiprocessor(config), 2);
  config.max_shared_bytes = 99 << 10;  // room for the tiles of one small worker
  config.tile_bytes /= 2;
  workers = 1;
  CHECK_EQ(Launcher::blocks_per_multiprocessor(config), 2);
  config.reduce = nullptr;
  CHECK_EQ(Launcher::blocks_per_multiprocessor(config), 3);
  recorder::state().occupancy = nullptr;
}

// In the background: on the group's stream, behind what the caller's stream held.
void check_background() {
  const PlanCase plan = make_plan();
  Ranks ranks(plan, 0, 1);
  recorder::state().complete = false;
  CHECK_EQ(ranks.call(0, plan, true), 1);
  std::vector<std::string> log = recorder::take_log();
  CHECK_EQ(log.size(), 6);
  CHECK(log[0].starts_with("record ") && log[0].ends_with(on(kUserStream)));
  const std::string before = log[0].substr(7, log[0].find(" on ") - 7);
  CHECK(log[1] == "wait for " + before + on(recorder::kOwnStream));
  CHECK(log[2].starts_with("copy ") && log[2].ends_with(on(recorder::kOwnStream)));
  CHECK(log[3].starts_with("record ") && log[3].ends_with(on(recorder::kOwnStream)));
  CHECK(log[4] == "launch" + on(recorder::kOwnStream));
  CHECK_EQ(recorder::state().launches.back().grid[0], kBackgroundSms);
  const std::string done = log[5].substr(7, log[5].find(" on ") - 7);
  CHECK(log[5].ends_with(on(recorder::kOwnStream)));
  CHECK(!ranks.engines[0]->is_completed(1));
  CHECK(ranks.engines[0]->wait(1, kUserStream, {}));
  CHECK(recorder::take_log() == std::vector<std::string>{"wait for " + done + on(kUserStream)});
  // The next call comes after this one, on whatever stream.
  const auto other = reinterpret_cast<Handle>(8);
  ranks.call(0, plan, false, other);
  log = recorder::take_log();
  CHECK(log[0] == "wait for " + done + on(other));
  CHECK(log[1].starts_with("copy "));
  recorder::complete_all();
}

// A ring entry is used again only after its event: until then the host waits, with whatever call.
void check_ring(bool with_load) {
  const PlanCase plan = make_plan();
  Ranks ranks(plan, 2, 1);
  recorder::state().complete = false;
  std::vector<Address> blocks;
  for (uint64_t i = 0; i < Launcher::kDepth; ++i) {
    ranks.call(0, plan, true);
    blocks.push_back(recorder::state().launches.back().args.calls.address);
  }
  std::sort(blocks.begin(), blocks.end());
  CHECK(std::unique(blocks.begin(), blocks.end()) == blocks.end());
  std::atomic<bool> returned{false};
  std::thread fifth([&] {
    const uint64_t call = with_load
                              ? ranks.engines[0]->gather({.load = 0x1000}, 0, {}, kUserStream, {})
                              : ranks.call(0, plan, true);
    CHECK_EQ(call, Launcher::kDepth + 1);
    returned = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(60));
  CHECK(!returned);
  CHECK_EQ(recorder::num_launches(), Launcher::kDepth);
  recorder::complete_all();
  fifth.join();
  CHECK_EQ(recorder::num_launches(), Launcher::kDepth + 1);
  CHECK(ranks.engines[0]->is_completed(1));
  // Ctrl-C while it waits: the call is not counted.
  for (uint64_t i = 1; i < Launcher::kDepth; ++i) ranks.call(0, plan, true);
  Mode mode;
  ranks.engines[0]->replicate(ranks.args(plan), true, kUserStream, [] { return true; }, &mode);
  CHECK_EQ(ranks.engines[0]->epoch(), 2 * Launcher::kDepth);
  recorder::complete_all();
}

// Ranks in one launch: the last to call launches for all, behind all their streams.
void check_shared_launch() {
  const PlanCase plan = make_plan();
  Ranks ranks(plan, 0, 3);
  CHECK_EQ(ranks.call(1, plan, true, reinterpret_cast<Handle>(21)), 1);
  CHECK_EQ(ranks.call(1, plan, true, reinterpret_cast<Handle>(21)), 2);
  CHECK_EQ(ranks.call(0, plan, false, reinterpret_cast<Handle>(20)), 1);
  CHECK_EQ(recorder::num_launches(), 0);
  CHECK(!ranks.engines[0]->is_completed(1));
  std::atomic<bool> returned{false};
  std::thread waits([&] {
    CHECK(ranks.engines[0]->wait(1, reinterpret_cast<Handle>(20), {}));
    returned = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  CHECK(!returned);
  recorder::state().complete = false;
  recorder::take_log();
  CHECK_EQ(ranks.call(2, plan, true, reinterpret_cast<Handle>(22)), 1);
  waits.join();
  CHECK_EQ(recorder::num_launches(), 1);
  const recorder::Launch launch = recorder::state().launches.back();
  CHECK(launch.stream == recorder::kOwnStream);
  CHECK_EQ(launch.grid[0], kBackgroundSms);  // some are in the background
  CHECK_EQ(launch.grid[1], 3);
  CHECK(launch.args.states.address == ranks.launcher->state(0));
  for (int32_t r = 0; r < 3; ++r)
    check_block(ranks, plan, r, launch.args.calls + r * launch.args.call_bytes);
  const std::vector<std::string> log = recorder::take_log();
  const auto launched = std::find(log.begin(), log.end(), "launch" + on(recorder::kOwnStream));
  CHECK_EQ(std::count_if(log.begin(), launched,
                         [](const std::string& line) { return line.starts_with("wait for "); }),
           3);
  // The others' second calls launch the second kernel.
  ranks.call(0, plan, true);
  CHECK_EQ(recorder::num_launches(), 1);
  ranks.call(2, plan, true);
  CHECK_EQ(recorder::num_launches(), 2);
  recorder::complete_all();
  for (const auto& engine : ranks.engines) CHECK(engine->synchronize(engine->epoch(), {}));
}

// Rejected input of one of the ranks in a launch.
void check_rejected() {
  const PlanCase plan = make_plan();
  Ranks ranks(plan, 0, 3);
  ranks.call(1, plan, true);  // owed, and still launched
  ranks.engines[1]->reject();
  CHECK_EQ(ranks.engines[1]->failed_epoch(), 2);
  CHECK(ranks.engines[1]->report().fault == uec::Fault::kRejected);
  ranks.call(0, plan, true);
  ranks.call(2, plan, true);
  CHECK_EQ(recorder::num_launches(), 1);
  CHECK(ranks.engines[0]->synchronize(1, {}));
  ranks.call(0, plan, true);
  CHECK(!ranks.engines[0]->synchronize(2, {}));
  const uec::Report report = ranks.engines[0]->report();
  CHECK(report.fault == uec::Fault::kRejected);
  CHECK_EQ(report.root, 1);
}

// What happens on the device reaches the host through the status word, and why it happened through
// the rank's own memory. Ranks that share its launches find the same there.
void check_device_failure() {
  const PlanCase plan = make_plan();
  Ranks ranks(plan, 0, 3);
  for (int32_t r = 0; r < 3; ++r) ranks.call(r, plan, true);
  const auto publish = [&](int32_t from, int32_t waited_for, int32_t aborted_by) {
    const auto layout = EngineLayout(ranks.config).symmetric;
    for (std::vector<uint64_t>& flags : ranks.flags)
      flags[layout.abort(from) / 8] = uec::AbortWord::make(1, waited_for, aborted_by).word;
  };
  publish(1, 0, -1);
  publish(0, 2, 1);
  Status& status = ranks.launcher->status(1);
  status.report.fault = uec::Fault::kMismatch;
  status.report.wait.peer = 0;
  status.report.epoch = 1;
  status.failed_call = 1;
  CHECK(ranks.engines[1]->peer_states().empty());  // nobody has asked
  CHECK_EQ(ranks.engines[1]->failed_epoch(), 1);
  CHECK(!ranks.engines[1]->wait(1, kUserStream, {}));
  CHECK(ranks.engines[1]->report().fault == uec::Fault::kMismatch);
  CHECK_EQ(ranks.engines[1]->report().root, 2);
  const uec::PeerStates peers = ranks.engines[1]->peer_states();
  CHECK_EQ(peers.size(), size_t{3});
  CHECK_EQ(peers[0].abort.waited_for(), 2);
  CHECK(peers[0].reached && !peers[0].gone);
  CHECK_EQ(peers[1].record.epoch_low(), 1u);  // which no rank publishes to itself
  CHECK(ranks.engines[0]->synchronize(1, {}));
  // Rank 1 will not call again: a rank that waits for the next launch learns of it.
  ranks.call(0, plan, true);
  CHECK(!ranks.engines[0]->synchronize(2, {}));
  CHECK(ranks.engines[0]->report().fault == uec::Fault::kAborted);
  CHECK_EQ(ranks.engines[0]->report().aborter, 1);
  CHECK_EQ(ranks.engines[0]->report().root, 2);
}

// The context may be lost along with the call: then the rank's own report is all there is.
void check_unreadable_memory() {
  const PlanCase plan = make_plan();
  Ranks ranks(plan, 1, 1);
  ranks.call(0, plan, true);
  Status& status = ranks.launcher->status(1);
  status.report.fault = uec::Fault::kMismatch;
  status.report.wait.peer = 2;
  status.report.epoch = status.failed_call = 1;
  recorder::state().read_result = 719;
  CHECK_EQ(ranks.engines[0]->report().root, 2);
  recorder::state().read_result = 0;
}

// A rank with launches of its own tells its peers by the notice kernel.
void check_notices() {
  const PlanCase plan = make_plan();
  const auto acts = [](Ranks& ranks) {
    recorder::state().on_launch = [&ranks](const recorder::Launch& launch) {
      if (launch.kernel != recorder::kNotice) return;
      Status& status = ranks.launcher->status(1);
      if (launch.notice == static_cast<int64_t>(uec::cuda::Notice::kClosed)) {
        status.disagreement = 2;
      } else {
        status.report.fault = uec::Fault::kCancelled;
        status.report.epoch = status.failed_call = 1;
      }
    };
  };
  {
    Ranks ranks(plan, 1, 1);
    acts(ranks);
    CHECK_EQ(ranks.engines[0]->close(), 2);
    const recorder::Launch launch = recorder::state().launches.back();
    CHECK(launch.stream == recorder::kOwnStream);
    CHECK_EQ(launch.block[0], 32);
    CHECK(launch.states == ranks.launcher->state(1));
    CHECK_EQ(ranks.engines[0]->close(), -1);
    CHECK_EQ(recorder::num_launches(), 1);
    CHECK_EQ(ranks.call(0, plan, false), 1);  // fails where it begins
    CHECK_EQ(ranks.engines[0]->failed_epoch(), 1);
    CHECK_EQ(recorder::num_launches(), 1);
  }
  {
    Ranks ranks(plan, 1, 1);
    acts(ranks);
    ranks.engines[0]->reject();
    CHECK_EQ(recorder::state().launches.back().notice, 0);
    CHECK_EQ(ranks.engines[0]->failed_epoch(), 1);
    ranks.call(0, plan, false);
    CHECK_EQ(recorder::num_launches(), 1);
  }
  {
    Ranks ranks(plan, 1, 1);
    acts(ranks);
    ranks.engines[0]->abort();
    CHECK_EQ(recorder::state().launches.back().notice, 1);
    CHECK_EQ(ranks.launcher->status(1).cancelled, 1);
    ranks.engines[0]->abort();
    CHECK_EQ(recorder::num_launches(), 1);
  }
  {
    // Ctrl-C in synchronize(): the kernel is cancelled, and is waited for.
    Ranks ranks(plan, 1, 1);
    recorder::state().on_launch = nullptr;
    recorder::state().complete = false;
    ranks.call(0, plan, true);
    std::thread device([&] {
      while (std::atomic_ref(ranks.launcher->status(1).cancelled).load() == 0)
        std::this_thread::yield();
      Status& status = ranks.launcher->status(1);
      status.report.fault = uec::Fault::kCancelled;
      std::atomic_ref(status.failed_call).store(1);
      recorder::complete_all();
    });
    CHECK(!ranks.engines[0]->synchronize(1, [] { return true; }));
    device.join();
  }
}

// A call that a capture refuses takes no epoch, and the group continues.
void check_refused_by_captures() {
  const PlanCase plan = make_plan();
  Ranks ranks(plan, 0, 1);
  for (const uec::cuda::Result result : {uec::cuda::kSuccess, uec::cuda::kCaptureImplicit}) {
    recorder::state().capturing = 1;
    recorder::state().capture_result = result;
    std::string text;
    try {
      ranks.call(0, plan, false);
    } catch (const uec::cuda::CaptureError& error) {
      text = error.what();
    }
    CHECK(text.find("rank 0: ") == 0);
    CHECK_EQ(text.find("legacy default stream") != std::string::npos,
             result == uec::cuda::kCaptureImplicit);
  }
  recorder::state().capturing = 0;
  recorder::state().capture_result = uec::cuda::kSuccess;
  CHECK_EQ(ranks.engines[0]->epoch(), 0);
  CHECK_EQ(ranks.call(0, plan, false), 1);
}

}  // namespace

int main() {
  check_state();
  check_in_place();
  check_residency();
  check_background();
  check_ring(false);
  check_ring(true);
  check_shared_launch();
  check_rejected();
  check_device_failure();
  check_unreadable_memory();
  check_notices();
  check_refused_by_captures();
  CHECK_EQ(recorder::state().contexts, 0);
  CHECK_EQ(recorder::state().events, 0);
}
