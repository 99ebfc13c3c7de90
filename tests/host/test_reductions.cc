// Gradients reduced by the host engine: every bit, whichever rank adds, in ranks that run ahead
// of others and use their memory again at once, and in calls that cannot succeed.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "host/gradients.hpp"
#include "support/check.hpp"
#include "support/plans.hpp"
#include "support/watchdog.hpp"

namespace {

using uec::Fault;
using uec::FlagKind;
using uec::GradType;

void sleep_us(int64_t us) { std::this_thread::sleep_for(std::chrono::microseconds(us)); }

// A copy of experts between reductions: only its order is tested here.
uint64_t copy_experts(GradientRanks& g, int32_t rank, const ReductionCase& call) {
  static const uint8_t weights[4096] = {};
  const std::vector<uint64_t> main_ptrs(
      g.ranks.num_segments() * g.ranks.layout().num_local_experts[rank],
      reinterpret_cast<uint64_t>(weights));
  return g.ranks.replicate(rank, call.slot_expert, main_ptrs, uec::Mode::kPush, call.background);
}

GroupOptions draw_options(Random& random) {
  GroupOptions options;
  const int64_t tiles[] = {1 << 10, 32 << 10, 64 << 10};
  options.tile_bytes = tiles[draw(random, 0, 2)];
  // Several groups of tiles at times, and often a tail.
  const int64_t sizes[] = {4, 100, options.tile_bytes + 4, (64 << 10) + 8, (160 << 10) + 4};
  for (int32_t i = draw(random, 1, 2); i > 0; --i) {
    options.grad_bytes.push_back(sizes[draw(random, 0, 4)]);
    options.grad_type.push_back(static_cast<GradType>(draw(random, 0, 1)));
  }
  options.num_workers = draw(random, 1, 3);
  return options;
}

// Random plans, modes and orders; each rank checks and overwrites its gradients as soon as it may.
void check_random(int repeats) {
  Random random(31);
  for (int repeat = 0; repeat < repeats; ++repeat) {
    const GroupOptions options = draw_options(random);
    std::vector<GradType> main_type;
    for (size_t i = 0; i < options.grad_bytes.size(); ++i)
      main_type.push_back(static_cast<GradType>(draw(random, 0, 1)));
    PlanCase group = draw_case(random, 5);
    GradientRanks g(group, options, main_type);
    std::vector<ReductionCase> calls;
    std::vector<bool> copies;
    for (uint64_t k = 0; k < 6; ++k) {
      draw_plan(group, random);
      const int32_t modes[] = {-1, ReductionCase::kPull, ReductionCase::kPull,
                               ReductionCase::kDirect};
      calls.push_back({.slot_expert = group.slot_expert,
                       .mode = modes[draw(random, 0, 3)],
                       .zero = draw(random, 0, 1) == 1,
                       .background = draw(random, 0, 2) == 0,
                       .seed = repeat * 100 + k});
      copies.push_back(draw(random, 0, 4) == 0);
    }
    g.ranks.on_each([&](int32_t rank) {
      for (size_t k = 0; k < calls.size(); ++k) {
        if (uec::mix(rank, repeat * 8 + k) % 8 == 0) sleep_us(500);
        if (copies[k]) {
          wait_ok(g.ranks.engine(rank), copy_experts(g, rank, calls[k]));
          continue;
        }
        g.fill(rank, calls[k]);
        wait_ok(g.ranks.engine(rank), g.submit(rank, calls[k]));
        g.check(rank, calls[k]);
        g.spoil(rank);
      }
      CHECK_EQ(g.ranks.engine(rank).close(), -1);
    });
  }
}

// Two replicas of expert 0, at home on rank 0, of several groups.
constexpr int64_t kBytes = 192 << 10;
GradientRanks three(const GroupOptions& options) {
  return GradientRanks(make_group(3, 3, 1), options, {GradType::kFloat32});
}
GroupOptions large() {
  return {.grad_bytes = {kBytes}, .grad_type = {GradType::kBFloat16}, .num_workers = 2};
}
ReductionCase both() {
  return {.slot_expert = {-1, 0, 0}, .mode = ReductionCase::kPull, .seed = 5};
}

// A home whose sums never come, because their hub is not run: it says what it waited for.
void check_flags() {
  GroupOptions options = large();
  options.wait_timeout = 0.3;
  GradientRanks g = three(options);
  const uec::SymmetricLayout& layout = g.ranks.layout().symmetric;
  const ReductionCase one{.slot_expert = {-1, 0, 0}, .mode = ReductionCase::kPull, .seed = 1};
  g.ranks.on_each([&](int32_t rank) {
    g.fill(rank, one);
    wait_ok(g.ranks.engine(rank), g.submit(rank, one));
  });
  // In call 2 of rank 0, ranks 1 and 2 are made to look as if they had called, and opened.
  const auto word = [&](int32_t rank, int64_t offset) {
    return std::atomic_ref(*reinterpret_cast<uint64_t*>(g.ranks.base(rank) + offset));
  };
  const uint64_t epoch =
      g.submit(0, {.slot_expert = {-1, 0, 0}, .mode = ReductionCase::kPull, .background = true});
  while (uec::CallRecord{word(1, layout.call(0)).load()}.epoch_low() != 2) sleep_us(100);
  for (const int32_t hub : {1, 2}) {
    word(0, layout.call(hub)).store(word(hub, layout.call(0)).load());
    word(0, layout.open(hub)).store(word(hub, layout.call(0)).load());
  }
  CHECK(!g.ranks.engine(0).wait(epoch));
  const uec::Report report = g.ranks.engine(0).report();
  CHECK(report.fault == Fault::kTimeout);
  CHECK(report.wait.flag == FlagKind::kSummed);
  CHECK_EQ(report.wait.seen, 1);
  CHECK_EQ(report.wait.expected, 2);
  CHECK_EQ(report.wait.expert, 0);
}

// A process that ends while its slot is waited for.
void check_gone() {
  int ends[2];
  CHECK(pipe(ends) == 0);
  GroupOptions options = large();
  options.peer_pipes = {{-1, ends[0], -1}, {-1, -1, -1}, {-1, -1, -1}};
  GradientRanks g = three(options);
  ReductionCase call = both();
  call.background = true;
  const uint64_t home = g.submit(0, call), hub = g.submit(2, call);
  sleep_us(20'000);
  CHECK(!g.ranks.engine(0).is_completed(home));
  close(ends[1]);
  CHECK(!g.ranks.engine(0).wait(home) && !g.ranks.engine(2).wait(hub));
  CHECK(g.ranks.engine(0).report().fault == Fault::kGone);
  CHECK(g.ranks.engine(2).report().fault == Fault::kAborted);  // it saw the abort
  for (const int32_t rank : {0, 2}) CHECK_EQ(g.ranks.engine(rank).report().root, 1);
  close(ends[0]);
}

// A slot's owner that fails inside a call has its gradients back at once, while others may still
// load them: whatever they make of that, no home succeeds with it.
void check_given_back() {
  for (int repeat = 0; repeat < scaled(12); ++repeat) {
    GradientRanks g = three(large());
    g.ranks.on_each([&](int32_t rank) {
      ReductionCase call = both();
      call.background = rank == 2;
      g.fill(rank, call);
      const uint64_t epoch = g.submit(rank, call);
      if (rank == 2) {
        sleep_us(repeat * 20);
        g.ranks.engine(2).abort();
        g.ranks.engine(2).wait(epoch);
        g.spoil(2);
      } else if (g.ranks.engine(rank).wait(epoch)) {
        g.check(rank, call);
      } else {
        CHECK_EQ(g.ranks.engine(rank).report().root, 2);
      }
    });
  }
}

}  // namespace

int main() {
  const Watchdog watchdog("a call does not end");
  check_flags();
  check_gone();
  if (!kSanitized) check_given_back();  // a race on purpose
  check_random(scaled(32));
}
