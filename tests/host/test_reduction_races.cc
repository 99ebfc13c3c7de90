// What a reduction's orderings promise, for ThreadSanitizer to see: all that a caller may do once a
// call has ended is done at once. Small, so that it can be run with one of the orderings broken.
#include <chrono>
#include <thread>

#include "host/gradients.hpp"
#include "support/check.hpp"
#include "support/plans.hpp"
#include "support/watchdog.hpp"

namespace {

using uec::GradType;

void sleep_us(int64_t us) { std::this_thread::sleep_for(std::chrono::microseconds(us)); }

// Every rank has every other rank's expert, in few bytes but several groups.
void check_races() {
  constexpr int32_t kRanks = 3;
  PlanCase group = make_group(kRanks, kRanks, kRanks - 1);
  for (int32_t r = 0; r < kRanks; ++r)
    for (int32_t s = 1; s < kRanks; ++s) CHECK(group.place((r + s) % kRanks, r));
  for (const GradType type : {GradType::kFloat32, GradType::kBFloat16})
    for (const int32_t num_workers : {2, 1}) {
      const GradType other = type == GradType::kFloat32 ? GradType::kBFloat16 : GradType::kFloat32;
      GradientRanks g(group,
                      {.grad_bytes = {4096, 4096, 4096, 2048},
                       .grad_type = {type, type, type, type},
                       .tile_bytes = 64 << 10,
                       .num_workers = num_workers},
                      {type, other, type, other});
      g.ranks.on_each([&](int32_t rank) {
        for (int32_t k = 0; k < 12; ++k) {
          const ReductionCase call{
              .slot_expert = group.slot_expert,
              .mode = k % 3 == 2 ? ReductionCase::kDirect : ReductionCase::kPull,
              .zero = k % 2 == 0,
              .background = k % 4 == 1,
              .seed = static_cast<uint64_t>(k)};
          g.fill(rank, call);
          const uint64_t epoch = g.submit(rank, call);
          while (call.background && !g.ranks.engine(rank).is_completed(epoch)) sleep_us(10);
          wait_ok(g.ranks.engine(rank), epoch);
          g.check(rank, call);
          g.spoil(rank);
        }
      });
    }
}

}  // namespace

int main() {
  const Watchdog watchdog("a call does not end");
  check_races();
}
