// The load kernel on the emulated device: every table, over many calls among others on the group,
// and how it fails.
#include <cstdio>
#include <limits>

#include "device/emulated_load.hpp"
#include "device/failures.hpp"
#include "support/watchdog.hpp"

namespace {

using namespace device_tests;

constexpr Mode kModes[] = {Mode::kPush, Mode::kPull, Mode::kDirect};

LoadShape draw_shape(Random& random) { return {draw(random, 1, 4), draw(random, 1, 3)}; }

// Several calls on one group, with other ids, types, addresses and numbers of blocks; now and then
// one that transfers weights.
void check_random(uint32_t seed, bool far) {
  Random random(seed);
  const int32_t num_experts = draw(random, 0, 9) == 0 ? draw(random, 20, 40) : draw(random, 1, 11);
  const int32_t num_ranks = draw(random, far ? 2 : 1, 5);
  PlanCase group = make_group(num_ranks, num_experts, 1);
  Options options;
  options.segment_bytes = {kTile + 48};
  options.far = far;
  if (far) {
    group.allow_cross_domain = true;
    for (int32_t r = 0; r < num_ranks; ++r) group.domain[r] = r % 2;
  }
  EmulatedGroup ranks(group, options);
  EmulatedLoad loads(ranks);
  const int calls = scaled(8) + 2;
  for (int call = 0; call < calls; ++call) {
    const bool apart = far || draw(random, 0, 1) == 0;
    if (draw(random, 0, 3) == 0) {
      draw_plan(ranks.group(), random);
      ranks.prepare(kModes[far ? 2 * draw(random, 0, 1) : draw(random, 0, 2)], {0});
      if (apart)
        ranks.launch_apart(draw(random, 1, 2));
      else
        ranks.launch(draw(random, 1, 2));
      ranks.check_success();
      continue;
    }
    loads.draw(random);
    const LoadShape shape = draw_shape(random);
    if (apart)
      loads.launch_apart(shape);
    else
      loads.launch(shape);
    loads.check_success();
  }
}

// The default timeout suits a busy machine.
Options small(double timeout = 5) {
  Options options;
  options.segment_bytes = {kTile};
  options.call_timeout = options.wait_timeout = timeout;
  return options;
}

struct Three {
  explicit Three(uint32_t seed, const Options& options = small())
      : random(seed), ranks(make_group(3, 5, 1), options), loads(ranks) {
    loads.draw(random);
  }

  Random random;
  EmulatedGroup ranks;
  EmulatedLoad loads;
};

// Rank 1 has several bad ids. It reports the first, and the peers are notified; the group is
// poisoned, and what its blocks share is ready for the next launch all the same.
void check_bad_ids(uint32_t seed) {
  Three group(seed);
  Random& random = group.random;
  const int32_t id_bytes = draw(random, 0, 1) == 0 ? 4 : 8;
  std::vector<int64_t> ids = draw_ids(random, 5, draw(random, 1, 90));
  const auto last = static_cast<int32_t>(ids.size()) - 1;
  const std::vector<int64_t> bad{5,
                                 -2,
                                 std::numeric_limits<int32_t>::min(),
                                 std::numeric_limits<int32_t>::max(),
                                 int64_t{1} << 32,  // as 32 bits an expert
                                 (int64_t{1} << 32) - 1,
                                 std::numeric_limits<int64_t>::min()};
  for (int32_t times = draw(random, 1, 3); times > 0; --times)
    ids[draw(random, 0, last)] = bad[draw(random, 0, id_bytes == 4 ? 3 : 6)];
  int64_t position = 0;
  while (ids[position] >= -1 && ids[position] < 5) ++position;
  group.loads.give(1, ids, id_bytes, draw(random, 0, 3));
  group.loads.launch(draw_shape(random));
  for (int32_t r = 0; r < 3; ++r) {
    const Status& status = group.ranks.status(r);
    CHECK_EQ(status.failed_call, uint64_t{1});
    CHECK(group.ranks.report(r).fault == Fault::kRejected);
    CHECK_EQ(group.ranks.report(r).root, 1);
    CHECK_EQ(status.bad_position, r == 1 ? position : -1);
    CHECK_EQ(status.bad_id, r == 1 ? ids[position] : 0);
    CHECK_EQ(group.ranks.state(r).epoch, uint64_t{0});
    CHECK_EQ(group.loads.table(r)[0], 0);
    group.loads.check_left_ready(r);
  }
  for (const int32_t peer : {0, 2})  // nothing of a rejected row
    CHECK_EQ(group.ranks.flag(peer, group.ranks.state(peer).layout.gathered(1)), uint64_t{0});

  group.loads.draw(random);  // at once: nothing is waited for, or exchanged
  group.loads.give(2, {77}, 4, 0);
  group.loads.launch(draw_shape(random));
  for (int32_t r = 0; r < 3; ++r) {
    CHECK_EQ(group.ranks.status(r).failed_call, uint64_t{1});
    CHECK_EQ(group.ranks.report(r).root, 1);
    CHECK_EQ(group.ranks.status(r).bad_position, r == 1 ? position : -1);
    CHECK_EQ(group.loads.table(r)[0], 0);
    group.loads.check_left_ready(r);
  }
}

// A peer turns out to be in another call when rows are on their way to others: they are delivered,
// so that nothing is in flight when the launch ends, but not published.
void check_fails_while_storing() {
  EmulatedGroup ranks(make_group(4, 5, 1), small());
  EmulatedLoad loads(ranks);
  Random random(8);
  loads.draw(random);
  const auto& layout = ranks.state(0).layout;
  const uint64_t digest =
      uec::mix(ranks.state(0).digest, static_cast<uint64_t>(uec::Operation::kGather));
  for (const int32_t peer : {1, 3})
    ranks.set_flag(
        0, layout.call(peer),
        uec::CallRecord::make(1, peer == 1 ? digest : ~digest, uec::RecordKind::kCall).word);
  loads.launch({1, 1}, 0, 1);  // one warp: it has both of them
  CHECK(ranks.report(0).fault == Fault::kMismatch);
  CHECK_EQ(ranks.report(0).wait.peer, 3);
  CHECK_EQ(ranks.flag(1, layout.gathered(0)), uint64_t{0});
  loads.check_left_ready(0);
}

// A rank is never launched: the others' waits expire, and they name it.
void check_timeout() {
  Three group(1, small(0.2));
  group.loads.launch({2, 2}, 0, 2);
  for (const int32_t r : {0, 1}) {
    CHECK_EQ(group.ranks.status(r).failed_call, uint64_t{1});
    const uec::Report report = group.ranks.report(r);
    CHECK(report.fault == Fault::kTimeout || report.fault == Fault::kAborted);
    CHECK_EQ(report.root, 2);
    CHECK(report.wait.flag == uec::FlagKind::kCall);
    group.loads.check_left_ready(r);
  }
  group.loads.launch({2, 2}, 2, 1);
  CHECK(group.ranks.report(2).fault == Fault::kAborted);
  // A rank that knows of a failure announces nothing.
  CHECK_EQ(group.ranks.flag(0, group.ranks.state(0).layout.call(2)), uint64_t{0});
  group.loads.check_left_ready(2);
}

void check_is_mismatch(Three& group) {
  int mismatches = 0;
  for (int32_t r = 0; r < 3; ++r) {
    CHECK_EQ(group.ranks.status(r).failed_call, uint64_t{1});
    const Fault fault = group.ranks.report(r).fault;
    CHECK(fault == Fault::kMismatch || fault == Fault::kAborted);
    mismatches += fault == Fault::kMismatch;
    group.loads.check_left_ready(r);
  }
  CHECK(mismatches > 0);
}

// A rank has made other calls before, or makes another one now.
void check_mismatches() {
  {
    Three group(2);
    group.ranks.state(1).digest ^= uint64_t{1} << 50;
    group.loads.launch({2, 2});
    check_is_mismatch(group);
  }
  {
    Three group(3);
    CHECK(group.ranks.group().place(0, 2));
    group.ranks.prepare(Mode::kPush, {0});
    Fibers launches;
    launches.spawn([&] { group.ranks.launch(1, 1); });
    launches.spawn([&] { group.loads.launch({1, 2}, 1, 2); });
    launches.wait();
    check_is_mismatch(group);
  }
}

// The host ends the waits of one rank, while another never comes.
void check_cancel() {
  Three group(4, small(60));
  cancel_while(group.ranks, [&] { group.loads.launch({2, 2}, 0, 2); });
  CHECK(group.ranks.report(0).fault == Fault::kCancelled);
  CHECK_EQ(group.ranks.report(0).root, 0);
  CHECK(group.ranks.report(1).fault == Fault::kAborted);
  CHECK_EQ(group.ranks.report(1).root, 0);
}

// Before the call begins, also if it would never have had to wait.
void check_cancelled_before(int32_t num_warps) {
  Three group(5);
  std::atomic_ref(group.ranks.status(1).cancelled).store(1);
  group.loads.launch({2, num_warps});
  CHECK(group.ranks.report(1).fault == Fault::kCancelled);
  CHECK_EQ(group.ranks.status(1).failed_call, uint64_t{1});
  CHECK_EQ(group.ranks.state(1).epoch, uint64_t{0});
  for (int32_t r = 0; r < 3; ++r) group.loads.check_left_ready(r);
}

// A rank was aborted by its host, or rejected other input.
void check_notices() {
  for (const Notice notice : {Notice::kAborted, Notice::kRejected}) {
    Three group(6);
    group.ranks.notify(2, notice);
    group.loads.launch({2, 2});
    for (const int32_t r : {0, 1}) {
      CHECK(group.ranks.report(r).fault ==
            (notice == Notice::kAborted ? Fault::kAborted : Fault::kRejected));
      CHECK_EQ(group.ranks.report(r).root, 2);
      CHECK_EQ(group.ranks.flag(2, group.ranks.state(2).layout.call(r)), uint64_t{0});
    }
  }
}

void check_grids() {
  using uec::cuda::LoadGrid;
  CHECK_EQ(LoadGrid::of(64, 256, 0, 132).num_blocks, 1);
  CHECK_EQ(LoadGrid::of(64, 256, 65536, 132).num_blocks, 19);
  CHECK_EQ(LoadGrid::of(64, 256, 1 << 30, 132).num_blocks, 132);
  CHECK(uec::cuda::load_fits(64, 128, 256, 48 << 10, 0));
  CHECK(!uec::cuda::load_fits(65, 128, 256, 48 << 10, 0));
  CHECK(!uec::cuda::load_fits(1, 128, 16 << 10, 48 << 10, 0));
  CHECK(!uec::cuda::load_fits(1, 128, 256, 48 << 10, 1023));
}

}  // namespace

int main() {
  const Watchdog watchdog("a launch that does not end");
  check_grids();
  const int cases = scaled(60) + 4;
  for (int seed = 0; seed < cases; ++seed) check_random(static_cast<uint32_t>(seed), seed % 3 == 1);
  for (uint32_t seed = 0; seed < static_cast<uint32_t>(scaled(60)); ++seed) check_bad_ids(seed);
  check_fails_while_storing();
  check_timeout();
  check_mismatches();
  check_cancel();
  for (const int32_t num_warps : {1, 3}) check_cancelled_before(num_warps);
  check_notices();
  std::printf("%d random groups\n", cases);
}
