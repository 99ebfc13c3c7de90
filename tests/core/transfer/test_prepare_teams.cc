// A call prepared by several threads is the call that one prepares, to the last integer.
#include "core/crowd.hpp"
#include "support/check.hpp"
#include "support/plans.hpp"
#include "support/prepare_cases.hpp"
#include "support/watchdog.hpp"

namespace {

constexpr int32_t kSizes[] = {2, 3, 4, 8};  // of teams

// So many replicas that the egress of all ranks together needs more than 32 bits; by more members
// than experts.
void check_large(Random& random) {
  PlanCase plan = make_group(1040, 80, 64);
  for (int32_t e = 0; e < 65; ++e)
    for (int32_t r = 0; r < plan.num_ranks; ++r) plan.place(e, r);
  PrepareCase c(plan, random);
  c.plan.resident.clear();  // all are moved
  c.mode = static_cast<int32_t>(uec::Mode::kPush);
  Given expected(c.capacity()), given(c.capacity());
  const PrepareAnswer answer = prepare_call(uec::SingleThread{}, c, expected);
  CHECK(expected.shape.num_replicas > 1 << 16);
  for (const PrepareAnswer& own : Crowd::run(66, [&] { return prepare_call(Crowd{}, c, given); }))
    CHECK(own == answer);
  check_equal(c, given, expected);
}

}  // namespace

int main() {
  const Watchdog watchdog("members that do not meet");
  check_prepared(200, 40, [](const auto& compare) {
    for (const int32_t size : kSizes)
      compare([&](const PrepareCase& c, Given& given) {
        return Crowd::run(size, [&] { return prepare_call(Crowd{}, c, given); });
      });
  });
  Random random(1);
  if (kPart == 1 || kSanitized) check_large(random);
}
