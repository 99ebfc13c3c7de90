// A call prepared by several threads is the call that one prepares, to the last integer; and what
// calls must differ in for their digests to differ.
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

void check_digests() {
  PlanCase plan = make_group(4, 4, 2);
  CHECK(plan.place(0, 1) && plan.place(0, 2) && plan.place(1, 2));
  constexpr int32_t segments[] = {0, 1};
  const std::vector<int32_t> residents(8, -1), others(8, 3);
  const std::vector<int64_t> bytes{3 << 20, 1};
  const std::vector<int32_t> local_idx = plan.local_idx();
  uec::ReplicateArgs args{.slot_expert = plan.slot_expert.data(),
                          .plan_digest = 1,
                          .tag = 1,
                          .segments = segments,
                          .num_segments = 2,
                          .mode = static_cast<int32_t>(uec::Mode::kPull),
                          .region = 0,
                          .bank = {.index = 0, .version = 1, .resident = residents.data()}};
  const auto digest_on = [&](int32_t rank) {
    Given given({4, 4, 2, 1, 2, 0, 1, 1});
    const uec::GroupTables tables{
        plan.topology(), rank, bytes.data(), local_idx.data(), 32 << 10, {}, {}};
    return fill_call(uec::SingleThread{}, tables, args, given.arrays, given.schedule, &given.shape,
                     &given.call);
  };
  const uec::ReplicateArgs same = args;
  const uint64_t digest = digest_on(0);
  const auto differs = [&](auto change) {
    args = same;
    change();
    CHECK(digest_on(0) != digest);
  };
  for (int32_t r = 1; r < 4; ++r) CHECK(digest_on(r) == digest);
  differs([&] { args.plan_digest ^= 1; });
  differs([&] { args.tag ^= 1; });
  differs([&] { args.num_segments = 1; });
  differs([&] { args.mode = static_cast<int32_t>(uec::Mode::kPush); });
  differs([&] { args.region = 1; });
  differs([&] { ++args.bank.index; });
  differs([&] { ++args.bank.version; });
  differs([&] { args.bank.resident = others.data(); });
  differs([&] { plan.slot_expert[4] = -1; });
}

}  // namespace

int main() {
  const Watchdog watchdog("members that do not meet");
  check_digests();
  check_prepared(200, 40, [](const auto& compare) {
    for (const int32_t size : kSizes)
      compare([&](const PrepareCase& c, Given& given) {
        return Crowd::run(size, [&] { return prepare_call(Crowd{}, c, given); });
      });
  });
  Random random(1);
  if (kPart == 1 || kSanitized) check_large(random);
}
