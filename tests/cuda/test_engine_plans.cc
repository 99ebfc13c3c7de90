// Calls of the CUDA engine whose plans are on the device, and those captured into graphs, over a
// driver that only writes down what it is asked.
#include <algorithm>
#include <tuple>
#include <utility>

#include "engine_ranks.hpp"

namespace {

using namespace engine_tests;

uec::cuda::DeviceReplicateArgs device_args(const Ranks& ranks, int32_t rank) {
  uec::cuda::DeviceReplicateArgs args;
  args.slot_expert = 0x5000 + rank;
  args.slot_quota = 0x6000;
  args.home_quota = 0x7000;
  args.home = 0x8000;
  args.tag = 0xA1;
  args.mains = ranks.mains.data();
  args.segments = 3;
  args.mode = static_cast<int32_t>(Mode::kDirect);
  return args;
}

// Of plans on the device only addresses travel: those of the plan in the arguments, and those of
// the weights in the blocks, unless they are on the device too.
void check_plans_on_device() {
  const PlanCase plan = make_plan();
  Ranks ranks(plan, 0, 3);
  for (int32_t r = 0; r < 3; ++r) {
    uec::cuda::DeviceReplicateArgs args = device_args(ranks, r);
    if (r == 2) std::tie(args.mains, args.table) = std::pair(nullptr, Address{0x9000});
    CHECK_EQ(ranks.engines[r]->replicate_on_device(args, false, kUserStream, {}), 1);
  }
  const recorder::Launch launch = recorder::state().launches.back();
  CHECK_EQ(launch.args.counted, 1);
  CHECK_EQ(launch.args.tag, 0xA1);
  for (int32_t r = 0; r < 3; ++r) {
    const uec::cuda::DeviceCall& call = launch.args.on_device[r];
    CHECK_EQ(call.slot_expert, Address{0x5000} + r);
    CHECK_EQ(call.slot_quota, 0x6000);
    CHECK_EQ(call.home_quota, 0x7000);
    CHECK_EQ(call.home, 0x8000);
    CHECK_EQ(call.segments, 3u);
    CHECK_EQ(call.mode, static_cast<int16_t>(Mode::kDirect));
    CHECK_EQ(call.regions, 0);
    CHECK_EQ(call.region, -1);
    if (r == 2) continue;
    const Address block = launch.args.calls + r * launch.args.call_bytes;
    CHECK(block < call.mains && call.mains < block + launch.args.call_bytes);
    const int32_t count = 2 * EngineLayout(ranks.config).num_mains[r];
    CHECK(std::equal(ranks.mains.begin(), ranks.mains.begin() + count,
                     reinterpret_cast<const uint64_t*>(call.mains)));
  }
  CHECK_EQ(launch.args.on_device[2].mains, 0x9000);
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
  const Address eager_calls = recorder::state().launches.back().args.calls;
  recorder::take_log();
  recorder::state().capturing = 1;
  for (uint64_t n : {1, 2}) {
    for (int32_t r = 0; r < 3; ++r) {
      uec::cuda::DeviceReplicateArgs args = device_args(ranks, r);
      args.mains = nullptr;
      args.table = 0x9000;
      CHECK_EQ(ranks.engines[r]->replicate_on_device(args, true, kUserStream, {}),
               uec::cuda::kCaptured | n);
    }
    const uec::cuda::LaunchArgs& args = recorder::state().launches.back().args;
    CHECK_EQ(args.counted, 0);
    CHECK(args.calls != eager_calls);
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

// Waiting for a captured call whose events are used again waits for the later one; a rank that is
// ahead of others in a capture, or alone in its own, is told.
void check_captured_far_ahead() {
  const PlanCase plan = make_plan();
  Ranks ranks(plan, 0, 3);
  const auto call = [&](int32_t rank) {
    uec::cuda::DeviceReplicateArgs args = device_args(ranks, rank);
    args.mains = nullptr;
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

// What closes a group, or tells its peers something, comes behind replays.
void check_ends_behind_replays() {
  const PlanCase plan = make_plan();
  for (const bool captured : {false, true}) {
    Ranks ranks(plan, 1, 1);
    recorder::state().capturing = captured;
    if (captured) {
      uec::cuda::DeviceReplicateArgs args = device_args(ranks, 1);
      args.mains = nullptr;
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

// A rank without experts has no table to be somewhere.
void check_captured_without_mains() {
  PlanCase group = make_group(2, 2, 1);
  group.home = {0, 0};
  Ranks ranks(group, 1, 1);
  recorder::state().capturing = 1;
  uec::cuda::DeviceReplicateArgs args = device_args(ranks, 1);
  args.mains = nullptr;
  CHECK_EQ(ranks.engines[0]->replicate_on_device(args, true, kUserStream, {}),
           uec::cuda::kCaptured | 1);
  recorder::state().capturing = 0;
}

}  // namespace

int main() {
  check_plans_on_device();
  check_captured();
  check_captured_without_mains();
  check_captured_far_ahead();
  check_ends_behind_replays();
  CHECK_EQ(recorder::state().contexts, 0);
  CHECK_EQ(recorder::state().events, 0);
}
