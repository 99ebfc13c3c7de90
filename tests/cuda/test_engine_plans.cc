// Calls of the CUDA engine whose plans are on the device, and those captured into graphs, over a
// driver that only records its calls.
#include <algorithm>
#include <tuple>
#include <utility>

#include "engine_ranks.hpp"
#include "host/prepared.hpp"

namespace {

using namespace engine_tests;

uec::cuda::DeviceReplicateArgs device_args(const Ranks& ranks, int32_t rank) {
  uec::cuda::DeviceReplicateArgs args;
  args.slot_expert = 0x5000 + rank;
  args.slot_quota = 0x6000;
  args.home_quota = 0x7000;
  args.home = 0x8000;
  args.tag = 0xA1;
  args.main_ptrs = ranks.main_ptrs.data();
  args.segments = 3;
  args.mode = static_cast<int32_t>(Mode::kDirect);
  return args;
}

// Plans on the device travel as addresses only: those of the plan in the arguments, and those of
// the weights in the blocks, unless they are on the device too.
void check_plans_on_device() {
  const PlanCase plan = make_plan();
  Ranks ranks(plan, 0, 3);
  for (int32_t r = 0; r < 3; ++r) {
    uec::cuda::DeviceReplicateArgs args = device_args(ranks, r);
    if (r == 2) std::tie(args.main_ptrs, args.table) = std::pair(nullptr, Address{0x9000});
    CHECK_EQ(ranks.engines[r]->replicate_on_device(args, false, kUserStream, {}), 1);
  }
  const recorder::Launch launch = recorder::state().launches.back();
  CHECK_EQ(launch.args.has_call_number, 1);
  CHECK_EQ(launch.args.tag, 0xA1);
  for (int32_t r = 0; r < 3; ++r) {
    const uec::cuda::DeviceCall& call = launch.args.on_device[r];
    CHECK_EQ(call.slot_expert.address, Address{0x5000} + r);
    CHECK_EQ(call.slot_quota.address, 0x6000);
    CHECK_EQ(call.home_quota.address, 0x7000);
    CHECK_EQ(call.home.address, 0x8000);
    CHECK_EQ(call.segments, 3u);
    CHECK_EQ(call.mode, static_cast<int16_t>(Mode::kDirect));
    CHECK_EQ(call.region_at.address, 0);
    CHECK_EQ(call.region, -1);
    if (r == 2) continue;
    const Address block = launch.args.calls.address + r * launch.args.call_bytes;
    CHECK(block < call.main_ptrs.address &&
          call.main_ptrs.address < block + launch.args.call_bytes);
    const int32_t count = 2 * EngineLayout(ranks.config).num_local_experts[r];
    CHECK(std::equal(ranks.main_ptrs.begin(), ranks.main_ptrs.begin() + count,
                     reinterpret_cast<const uint64_t*>(call.main_ptrs.address)));
  }
  CHECK_EQ(launch.args.on_device[2].main_ptrs.address, 0x9000);
  std::vector<std::string> copies;
  for (const std::string& line : recorder::take_log())
    if (line.starts_with("copy ")) copies.push_back(line);
  CHECK(copies == (std::vector<std::string>{"copy 48" + on(recorder::kOwnStream),
                                            "copy 32" + on(recorder::kOwnStream)}));
}

// Captured calls are numbered and ordered apart, copy nothing, and query nothing.
void check_captured() {
  const PlanCase plan = make_plan();
  Ranks ranks(plan, 0, 3);
  for (int32_t r = 0; r < 3; ++r) ranks.call(r, plan, true);
  const Address eager_calls = recorder::state().launches.back().args.calls.address;
  recorder::take_log();
  recorder::state().capturing = 1;
  for (uint64_t n : {1, 2}) {
    for (int32_t r = 0; r < 3; ++r) {
      uec::cuda::DeviceReplicateArgs args = device_args(ranks, r);
      args.main_ptrs = nullptr;
      args.table = 0x9000;
      CHECK_EQ(ranks.engines[r]->replicate_on_device(args, true, kUserStream, {}),
               uec::cuda::kCaptured | n);
    }
    const uec::cuda::LaunchArgs& args = recorder::state().launches.back().args;
    CHECK_EQ(args.has_call_number, 0);
    CHECK(args.calls.address != eager_calls);
    CHECK(recorder::state().launches.back().stream == recorder::kCapturedStream);
    const std::vector<std::string> log = recorder::take_log();
    const auto waits = std::count_if(log.begin(), log.end(), [](const std::string& line) {
      return line.starts_with("wait for ");
    });
    CHECK_EQ(waits, n == 1 ? 3 : 4);  // the ranks' streams, and the captured call before
    CHECK(std::none_of(log.begin(), log.end(),
                       [](const std::string& line) { return line.starts_with("copy "); }));
  }
  CHECK(ranks.engines[1]->wait(uec::cuda::kCaptured | 2, kUserStream, {}));
  CHECK_EQ(recorder::take_log().size(), size_t{1});
  recorder::state().capturing = 0;
  CHECK_EQ(ranks.engines[0]->epoch(), 1);
}

// A wait on the other side of a capture's border than its call is refused without a driver call.
void check_waits_across_captures() {
  const PlanCase plan = make_plan();
  Ranks ranks(plan, 1, 1);
  Engine& engine = *ranks.engines[0];
  const auto refusal = [&](uint64_t call) -> std::string {
    recorder::take_log();
    try {
      engine.wait(call, kUserStream, {});
    } catch (const uec::cuda::CaptureError& error) {
      CHECK(recorder::take_log().empty());
      return error.what();
    }
    return {};
  };
  uec::cuda::DeviceReplicateArgs args = device_args(ranks, 1);
  args.main_ptrs = nullptr;
  args.table = 0x9000;
  const auto call = [&] { return engine.replicate_on_device(args, true, kUserStream, {}); };
  const uint64_t eager = call();
  recorder::state().capturing = 1;
  CHECK(refusal(eager).starts_with("rank 1: wait() in a capture into a CUDA graph for a call"));
  const uint64_t first = call(), second = call();
  CHECK(refusal(first).empty());
  CHECK_EQ(recorder::take_log().size(), size_t{1});
  recorder::state().capture = 10;
  CHECK(refusal(second).starts_with("rank 1: wait() for a call that is a part of a CUDA graph"));
  std::vector<uint64_t> others;
  for (uint64_t n = 0; n <= Launcher::kDepth; ++n) others.push_back(call());
  CHECK(!refusal(second).empty());  // its events are a later call's by now
  CHECK(refusal(others.front()).empty());
  CHECK(refusal(others.back()).empty());
  recorder::state().capturing = 0;
  CHECK(!refusal(others.back()).empty());
  CHECK(refusal(eager).empty());
  CHECK_EQ(engine.failed_epoch(), 0);
  recorder::state().capture = 9;
}

// Asking for an event is refused in every mode but one, which threads have for no longer.
void check_queries_beside_a_capture() {
  const PlanCase plan = make_plan();
  Ranks ranks(plan, 1, 1);
  const uint64_t call = ranks.call(0, plan, true);
  recorder::state().capturing = 1;  // and the driver does not say which thread's
  CHECK(ranks.engines[0]->is_completed(call));
  CHECK_EQ(recorder::state().mode, 0);
  recorder::state().capturing = 0;
}

// Waiting for a captured call whose events are used again waits for the later one; a rank that is
// ahead of others in a capture, or alone in its own, gets an error.
void check_captured_far_ahead() {
  const PlanCase plan = make_plan();
  Ranks ranks(plan, 0, 3);
  const auto call = [&](int32_t rank) {
    uec::cuda::DeviceReplicateArgs args = device_args(ranks, rank);
    args.main_ptrs = nullptr;
    args.table = 0x9000;
    return ranks.engines[rank]->replicate_on_device(args, true, kUserStream, {});
  };
  const auto throws = [](const auto& run) {
    try {
      run();
    } catch (const uec::cuda::CaptureError&) {
      return true;
    }
    return false;
  };
  recorder::state().capturing = 1;
  for (uint64_t n = 1; n <= Launcher::kDepth + 1; ++n)
    for (int32_t r = 0; r < 3; ++r) call(r);
  recorder::take_log();
  CHECK(ranks.engines[0]->wait(uec::cuda::kCaptured | 1, kUserStream, {}));
  CHECK_EQ(recorder::take_log().size(), size_t{1});
  for (uint64_t n = 0; n < Launcher::kDepth; ++n) call(1);
  CHECK(throws([&] { call(1); }));
  CHECK_EQ(ranks.engines[1]->failed_epoch(), 0);

  recorder::state().capture = 10;  // another one: what was submitted is forgotten
  call(0);
  CHECK(throws([&] { ranks.engines[1]->wait(uec::cuda::kCaptured | 9, kUserStream, {}); }));
  recorder::state().capturing = 2;  // invalid by now
  CHECK(throws([&] { call(2); }));
  recorder::state().capturing = 0;
  recorder::state().capture = 9;
  CHECK_EQ(ranks.engines[2]->failed_epoch(), 0);
}

// Closing a group, or telling its peers something, comes after replays.
void check_ends_behind_replays() {
  const PlanCase plan = make_plan();
  for (const bool captured : {false, true}) {
    Ranks ranks(plan, 1, 1);
    recorder::state().capturing = captured;
    if (captured) {
      uec::cuda::DeviceReplicateArgs args = device_args(ranks, 1);
      args.main_ptrs = nullptr;
      args.table = 0x9000;
      ranks.engines[0]->replicate_on_device(args, true, kUserStream, {});
    }
    recorder::state().capturing = 0;
    recorder::take_log();
    ranks.engines[0]->close();
    const std::vector<std::string> log = recorder::take_log();
    const auto waited = std::find(log.begin(), log.end(), "synchronize");
    CHECK_EQ(waited != log.end(), captured);
    CHECK(!captured ||
          waited < std::find(log.begin(), log.end(), "notice" + on(recorder::kOwnStream)));
  }
}

// A rank without experts needs no table.
void check_captured_without_mains() {
  PlanCase group = make_group(2, 2, 1);
  group.home = {0, 0};
  Ranks ranks(group, 1, 1);
  recorder::state().capturing = 1;
  uec::cuda::DeviceReplicateArgs args = device_args(ranks, 1);
  args.main_ptrs = nullptr;
  CHECK_EQ(ranks.engines[0]->replicate_on_device(args, true, kUserStream, {}),
           uec::cuda::kCaptured | 1);
  recorder::state().capturing = 0;
}

// Reductions have their own kernel. What the host prepares of one is what the host engine would,
// and of plans on the device addresses and types travel.
void check_reductions() {
  const PlanCase plan = make_plan();
  Ranks ranks(plan, 0, 3);
  const uec::GradType types[] = {uec::GradType::kBFloat16, uec::GradType::kFloat32};
  uec::ReduceArgs args;
  args.slot_expert = plan.slot_expert.data();
  args.main_ptrs = ranks.main_ptrs.data();
  args.main_type = types;
  args.mode = static_cast<int32_t>(Mode::kPull);
  for (int32_t r = 0; r < 2; ++r) {
    Mode mode = Mode::kPush;
    CHECK_EQ(ranks.engines[r]->reduce(args, false, kUserStream, {}, &mode), 1);
    CHECK(mode == Mode::kPull);
  }
  CHECK(recorder::state().launches.empty());
  uec::cuda::DeviceReduceArgs device;
  device.slot_expert = 0x5000;
  device.home = 0x8000;
  device.main_ptrs = ranks.main_ptrs.data();
  device.main_types = 1;
  device.zero = false;
  CHECK_EQ(ranks.engines[2]->reduce_on_device(device, true, kUserStream, {}), 1);
  const recorder::Launch launch = recorder::state().launches.back();
  CHECK(launch.kernel == recorder::kReduce);
  CHECK(launch.together);
  CHECK_EQ(launch.grid[0], kBackgroundSms);
  CHECK_EQ(launch.grid[1], 3);
  CHECK_EQ(launch.block[0], uec::kReduceWarps * 32);
  CHECK_EQ(launch.shared_bytes, uec::cuda::reduce_shared_bytes(ranks.capacity()));
  for (int32_t r = 0; r < 2; ++r) {
    EngineConfig config = ranks.config;
    config.rank = r;
    const EngineLayout layout(config);
    const uec::Capacity capacity = layout.capacity(config);
    uec::host::Prepared expected(capacity, 1);
    const uint64_t digest =
        uec::fill_call(uec::SingleThread{}, layout.tables(config), args, expected.arrays,
                       expected.schedule, &expected.shape, &expected.call);
    auto* const block = launch.args.calls + r * launch.args.call_bytes;
    const auto& header = *reinterpret_cast<const CallHeader*>(block);
    const uec::Worklist& work = expected.call.work;
    CHECK(header.digest == digest);
    uec::CallBody found = header.body;
    uec::cuda::place_arrays(uec::SingleThread{}, found, header.pointers, block, block);
    CHECK(found.addresses.regions == nullptr);
    CHECK_EQ(found.work.num_pieces, 0);
    CHECK(work.num_reductions > 0);
    CHECK_EQ(found.work.num_reductions, work.num_reductions);
    CHECK_EQ(found.work.num_expected, work.num_expected);
    CHECK(std::equal(config.grad_bytes.begin(), config.grad_bytes.end(), found.grads.bytes));
    CHECK(std::equal(config.grad_type.begin(), config.grad_type.end(), found.grads.type));
    CHECK(std::equal(layout.grad_offset.begin(), layout.grad_offset.end(), found.grads.offset));
    CHECK(std::equal(types, types + 2, found.main_type));
    for (int32_t i = 0; i < 2 * capacity.num_local_experts; ++i)
      CHECK(reinterpret_cast<uint64_t>(found.addresses.main_ptrs[i]) == ranks.main_ptrs[i]);
    for (int32_t i = 0; i < work.num_reductions; ++i) {
      const uec::Reduction &a = found.work.reductions[i], &b = work.reductions[i];
      CHECK(a.kind == b.kind && a.begin == b.begin && a.end == b.end && a.first == b.first);
      CHECK_EQ(found.arrived[i], 0);
    }
    const RankState& state = ranks.state(r);
    for (int32_t i = 0; i < 2; ++i) {
      CHECK_EQ(state.grad_bytes[i], config.grad_bytes[i]);
      CHECK(state.grad_type[i] == config.grad_type[i]);
    }
  }
  const uec::cuda::DeviceCall& call = launch.args.on_device[2];
  CHECK_EQ(call.slot_expert.address, 0x5000);
  CHECK_EQ(call.segments, 1u);
  CHECK_EQ(call.mode, -1);
  CHECK_EQ(call.zero, 0);
  const int32_t count = 2 * EngineLayout(ranks.config).num_local_experts[2];
  CHECK(std::equal(ranks.main_ptrs.begin(), ranks.main_ptrs.begin() + count,
                   reinterpret_cast<const uint64_t*>(call.main_ptrs.address)));
}

// Ranks of a launch that make different calls: none of them is launched.
void check_operations_agree() {
  const PlanCase plan = make_plan();
  Ranks ranks(plan, 0, 3);
  uec::cuda::DeviceReduceArgs device;
  device.slot_expert = 0x5000;
  device.main_ptrs = ranks.main_ptrs.data();
  ranks.call(0, plan, false);
  ranks.call(1, plan, false);
  ranks.engines[2]->reduce_on_device(device, false, kUserStream, {});
  CHECK(recorder::state().launches.empty());
  for (int32_t r = 0; r < 3; ++r) CHECK_EQ(ranks.engines[r]->failed_epoch(), 1);
  CHECK(ranks.engines[0]->report().fault == uec::Fault::kMismatch);
}

}  // namespace

// What slots hold is in device memory, and known to the host as long as it knows all plans.
void check_banks() {
  const PlanCase plan = make_plan();
  Ranks ranks(plan, 1, 1);
  Engine& engine = *ranks.engines[0];
  const std::vector<int32_t> nothing(plan.slot_expert.size(), -1);
  const uec::BankTable* const table = ranks.state(1).banks + 1;
  CHECK(std::equal(nothing.begin(), nothing.end(), table->resident));
  uec::cuda::DeviceReplicateArgs args = device_args(ranks, 1);
  args.bank = 1;
  args.known = plan.slot_expert.data();
  const auto call = [&] {
    recorder::take_log();
    engine.replicate_on_device(args, false, kUserStream, {});
    return recorder::take_log();
  };
  const auto residents = [&](int32_t bank) { return engine.residents(bank, kUserStream, {}); };
  const std::string set = "set 1" + on(kUserStream), launch = "launch" + on(kUserStream);

  CHECK(call().back().starts_with("record"));
  const recorder::Launch last = recorder::state().launches.back();
  CHECK(last.kernel == recorder::kKernel);
  CHECK_EQ(last.args.bank, 1);
  CHECK(residents(1) == plan.slot_expert);
  CHECK(residents(0) == nothing);

  // Other weights empty the table before the launch, in the caller's stream.
  args.version = (uint64_t{7} << 32) + 3;
  const auto log = call();
  const auto first = std::find(log.begin(), log.end(), set);
  CHECK_EQ(std::count(log.begin(), log.end(), set), 4);  // halves of two words
  CHECK(first < std::find(log.begin(), log.end(), launch));
  CHECK_EQ(table->version, args.version);
  CHECK_EQ(table->segments, uint64_t{0});  // no kernel has run
  CHECK_EQ(engine.version(1), args.version);
  CHECK(residents(1) == plan.slot_expert);
  const auto again = call();
  CHECK_EQ(std::count(again.begin(), again.end(), set), 0);
  engine.invalidate(1, kUserStream, {});
  CHECK_EQ(engine.version(1), args.version + 1);
  CHECK(residents(1) == nothing);

  // A plan on the device reads the table where the calls before it have left it, on any stream;
  // one without a bank leaves nothing in the first.
  const auto waits_of = [&](int32_t bank) {
    recorder::take_log();
    const auto at = engine.bank_table(bank, reinterpret_cast<Handle>(8), {});
    CHECK_EQ(at, reinterpret_cast<uint64_t>(table) + (bank - 1) * int64_t{sizeof *table});
    const auto waits = recorder::take_log();
    return std::count_if(waits.begin(), waits.end(),
                         [](const std::string& line) { return line.starts_with("wait for "); });
  };
  CHECK_EQ(waits_of(1), 1);
  CHECK_EQ(waits_of(0), 0);
  args.bank = -1;
  call();
  CHECK_EQ(waits_of(0), 1);
  args.bank = 1;

  // After a plan that only the device knows, its table is read.
  args.version = engine.version(1);
  args.known = nullptr;
  call();
  auto* const known = const_cast<uec::BankTable*>(table);
  known->segments = 3;
  known->resident[0] = 5;
  CHECK_EQ(residents(1)[0], 5);
  known->segments = 0;
  CHECK_EQ(residents(1)[0], 5);  // is known again
  args.known = plan.slot_expert.data();
  call();
  CHECK(residents(1) != nothing);

  // Replays change it behind the host's back; a capture cannot read it.
  args.main_ptrs = nullptr;
  args.table = 0x9000;
  recorder::state().capturing = 1;
  call();
  bool refused = false;
  try {
    residents(1);
  } catch (const uec::cuda::CaptureError&) {
    refused = true;
  }
  CHECK(refused);
  recorder::state().capturing = 0;
  CHECK(residents(1) == nothing);  // as the table says
  known->segments = 3;
  recorder::state().complete = false;  // the stream is busy: Ctrl-C ends the wait for it
  int asked = 0;
  CHECK(engine.residents(1, kUserStream, [&] { return ++asked == 3; }) == nothing);
  recorder::state().complete = true;
  recorder::complete_all();
  CHECK_EQ(residents(1)[0], 5);

  // A stream waits for a slot's word, of the call's own bank.
  recorder::state().capturing = 0;
  recorder::take_log();
  const uint64_t epoch = engine.epoch();
  CHECK(engine.wait_slots(epoch, {1}, kUserStream, {}));
  const auto words = ranks.state(1).slot_words;
  const auto at = reinterpret_cast<uint64_t>(words + plan.slots_per_rank + 1);
  const std::string wait =
      "wait for " + std::to_string(epoch + 1) + " at " + std::to_string(at) + on(kUserStream);
  CHECK(recorder::take_log() == std::vector<std::string>{wait});
  CHECK_EQ(engine.ready(1), at - sizeof(uint64_t));
  // In the background: first for what was recorded right before the kernel.
  engine.replicate_on_device(args, true, kUserStream, {});
  const auto submitted = recorder::take_log();
  const std::string begins =
      *(std::find(submitted.begin(), submitted.end(), "launch" + on(recorder::kOwnStream)) - 1);
  CHECK(begins.starts_with("record ") && begins.ends_with(on(recorder::kOwnStream)));
  CHECK(engine.wait_slots(engine.epoch(), {1}, kUserStream, {}));
  const auto waits = recorder::take_log();
  CHECK_EQ(waits.size(), 2);
  CHECK(waits[0] == "wait for " + begins.substr(7, begins.find(" on ") - 7) + on(kUserStream));

  // Without a bank, the slots of bank 0 are filled.
  args.bank = 0;
  args.version = 0;
  call();
  CHECK(residents(0) == plan.slot_expert);
  ranks.call(0, plan, false);
  CHECK(recorder::state().launches.back().kernel == recorder::kKernel);
  CHECK(residents(0) == nothing);
}

int main() {
  check_banks();
  check_reductions();
  check_operations_agree();
  check_plans_on_device();
  check_captured();
  check_captured_without_mains();
  check_waits_across_captures();
  check_queries_beside_a_capture();
  check_captured_far_ahead();
  check_ends_behind_replays();
  CHECK_EQ(recorder::state().contexts, 0);
  CHECK_EQ(recorder::state().events, 0);
}
