// Banks on the emulated device: what a slot holds stays, what is missing is moved, and the tables
// in device memory say so; over many calls, versions of the weights, and banks.
#include <algorithm>
#include <vector>

#include "core/transfer/bank.hpp"
#include "device/failures.hpp"
#include "support/watchdog.hpp"

namespace {

using namespace device_tests;

// What the slots of a bank hold, by the core's functions.
struct Held {
  explicit Held(const PlanCase& group) : resident(group.slot_expert.size(), -1) {
    table.resident = resident.data();
  }
  Held(Held&& other) noexcept : resident(std::move(other.resident)), table(other.table) {
    table.resident = resident.data();
  }
  std::vector<int32_t> resident;
  uec::BankTable table;
};

class BankedGroup : public EmulatedGroup {
 public:
  BankedGroup(const PlanCase& group, const Options& options) : EmulatedGroup(group, options) {
    for (int32_t i = 0; i < options.num_banks; ++i) held_.emplace_back(group);
    const auto slots = options.num_banks * group.slot_expert.size();
    content_.assign(slots * options.segment_bytes.size(), {0, -1});
    poison();
  }

  // The weights change, and all banks are invalidated.
  void change_weights() {
    weights_ = call_ + 1;
    for (int32_t i = 0; i < options().num_banks; ++i) {
      held_[i].table.segments = 0;
      for (int32_t r = 0; r < group().num_ranks; ++r) invalidate(r, i);
    }
  }

  // As Engine::invalidate() has it done.
  void invalidate(int32_t rank, int32_t bank) {
    rank_banks_[rank].tables[bank].segments = 0;
    rank_banks_[rank].tables[bank].version = weights_;
  }

  // A call for a bank, or without one (-1), with the weights of the last.
  void prepare(int32_t bank, Mode mode, const std::vector<int32_t>& segments) {
    if (call_ == 0) weights_ = 1;
    ++call_;
    bank_ = bank;
    selected_ = segments;
    for (int32_t r = 0; r < group().num_ranks; ++r) prepare_rank(r, mode, group().slot_expert);
  }

  // Counts what the call should move, and notes what slots hold then.
  int64_t expect() {
    const uec::Topology t = group().topology();
    Held& held = held_[std::max(bank_, 0)];
    uint64_t mask = 0;
    for (const int32_t i : selected_) mask |= uint64_t{1} << i;
    if (bank_ >= 0)
      uec::expire_residents(uec::SingleThread{}, t, held.table.version, mask, held.table);
    else
      uec::clear_residents(uec::SingleThread{}, t, held.table.resident);
    int64_t bytes = 0;
    for (size_t at = 0; at < held.resident.size(); ++at) {
      const int32_t expert = group().slot_expert[at];
      if (expert < 0 || held.resident[at] == expert) continue;
      for (const int32_t i : selected_) {
        bytes += options().segment_bytes[i];
        content(std::max(bank_, 0), static_cast<int32_t>(at), i) = {weights_, expert};
      }
    }
    if (bank_ >= 0)
      uec::note_residents(uec::SingleThread{}, t, group().slot_expert.data(), held.table);
    else
      held.table.segments = 0;
    return bytes;
  }

  void check_all() {
    check_states();
    for (int32_t r = 0; r < group().num_ranks; ++r)
      for (int32_t b = 0; b < options().num_banks; ++b) check_bank(r, b);
  }

  int64_t bytes_stored() {
    int64_t bytes = 0;
    for (int32_t r = 0; r < group().num_ranks; ++r)
      bytes += static_cast<int64_t>(state(r).bytes_stored);
    return bytes;
  }

 private:
  struct Content {
    uint64_t weights;
    int32_t expert;  // -1: poison
  };

  Content& content(int32_t bank, int32_t at, int32_t segment) {
    const auto slots = static_cast<int32_t>(group().slot_expert.size());
    return content_[(bank * slots + at) * options().segment_bytes.size() + segment];
  }

  void check_bank(int32_t r, int32_t bank) {
    const int32_t slots = group().slots_per_rank;
    const uec::BankTable& table = rank_banks_[r].tables[bank];
    if (held_[bank].table.segments == 0)
      CHECK_EQ(table.segments, uint64_t{0});
    else
      for (size_t at = 0; at < held_[bank].resident.size(); ++at)
        CHECK_EQ(table.resident[at], held_[bank].resident[at]);
    for (int32_t s = 0; s < slots; ++s)
      for (int32_t i = 0; i < num_segments(); ++i) {
        const Content& is = content(bank, r * slots + s, i);
        const uint8_t* const bytes = slot(r, i, bank * slots + s);
        for (int64_t at = 0; at < options().segment_bytes[i]; ++at)
          CHECK_EQ(bytes[at], is.expert < 0 ? kPoison : payload(is.weights, is.expert, i, at));
      }
  }

  // What launch_apart() checks is checked for all ranks at the end.
  void check_rank(int32_t) override {}

  void poison() {
    for (int32_t r = 0; r < group().num_ranks; ++r)
      for (int32_t i = 0; i < num_segments(); ++i)
        for (int32_t s = 0; s < options().num_banks * group().slots_per_rank; ++s)
          std::fill_n(slot(r, i, s), options().segment_bytes[i], kPoison);
  }

  std::vector<Held> held_;        // [banks]
  std::vector<Content> content_;  // [banks][G][S][segments]
};

Options small_options(int32_t num_banks) {
  Options options;
  options.segment_bytes = {3 * kTile + 80, 40};
  options.call_timeout = options.wait_timeout = 5;
  options.plans = Plans::kOnDevice;
  options.num_banks = num_banks;
  return options;
}

// Plans that have much in common with those before, for banks in turn.
int64_t check_random(uint32_t seed) {
  Random random(seed);
  PlanCase group = make_group(draw(random, 2, 4), draw(random, 3, 9), draw(random, 1, 3));
  Options options = small_options(draw(random, 1, 3));
  options.instance_align = draw(random, 0, 1) * 4096;
  options.far = draw(random, 0, 2) == 0;
  if (options.far) {
    group.allow_cross_domain = true;
    for (int32_t r = 0; r < group.num_ranks; ++r) group.domain[r] = r % 2;
  }
  BankedGroup ranks(group, options);
  std::vector<PlanCase> planned(options.num_banks, group);
  std::vector<int32_t> segments{0, 1};
  int64_t bytes = 0, kept = 0;
  for (int call = 0; call < 8; ++call) {
    if (draw(random, 0, 4) == 0) ranks.change_weights();
    if (draw(random, 0, 5) == 0)
      segments = segments.size() == 2 ? std::vector<int32_t>{1} : std::vector<int32_t>{0, 1};
    const int32_t bank = draw(random, 0, options.num_banks - 1);
    PlanCase& plan = planned[bank];
    for (int32_t& expert : plan.slot_expert)
      if (draw(random, 0, 3) == 0) expert = -1;
    for (int32_t n = draw(random, 0, 5); n > 0; --n)
      plan.place(draw(random, 0, group.num_experts - 1), draw(random, 0, group.num_ranks - 1));
    ranks.group().slot_expert = plan.slot_expert;
    const Mode mode = draw(random, 0, 1) == 0 ? Mode::kPush : Mode::kDirect;
    ranks.prepare(bank == 0 && draw(random, 0, 4) == 0 ? -1 : bank, mode, segments);
    const int64_t moved = ranks.expect();
    bytes += moved;
    for (const int32_t expert : plan.slot_expert)
      for (const int32_t i : segments) kept += expert < 0 ? 0 : options.segment_bytes[i];
    kept -= moved;
    if (options.far || draw(random, 0, 1) == 0)
      ranks.launch_apart(draw(random, 1, 2));
    else
      ranks.launch(draw(random, 1, 2));
    ranks.check_all();
    if (!options.far) CHECK_EQ(ranks.bytes_stored(), bytes);
  }
  return kept;
}

// One rank has not been told that the weights have changed.
void check_stale_rank() {
  PlanCase group = three_ranks();
  BankedGroup ranks(group, small_options(2));
  ranks.prepare(1, Mode::kPush, {0, 1});
  ranks.launch(2);
  ranks.expect();
  ranks.check_all();
  ranks.group().clear();
  CHECK(ranks.group().place(0, 2));  // stays
  CHECK(ranks.group().place(2, 1));
  ranks.prepare(1, Mode::kPush, {0, 1});
  for (const int32_t r : {0, 1}) ranks.invalidate(r, 1);
  launch_mismatch(ranks, 2, 2);
}

}  // namespace

int main() {
  const Watchdog watchdog("a launch that does not end");
  const int cases = scaled(40) + 8;
  int64_t kept = 0;
  for (int seed = 0; seed < cases; ++seed) kept += check_random(static_cast<uint32_t>(seed));
  CHECK(kept > 0);
  check_stale_rank();
  std::printf("%d random groups, %lld bytes stayed\n", cases, static_cast<long long>(kept));
}
