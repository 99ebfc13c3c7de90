// Banks on the host engine: slots keep what they hold, nothing else is moved, and what is moved is
// right, whoever sends it; over many calls, versions of the weights, and banks.
#include <algorithm>
#include <atomic>
#include <vector>

#include "host/engine.hpp"
#include "host/ranks.hpp"
#include "support/check.hpp"
#include "support/plans.hpp"

namespace {

using uec::Mode;

struct BankCall {
  int32_t bank = 0;  // -1: none, with the slots of bank 0
  std::vector<int32_t> slot_expert;
  uint64_t version = 0;
  int32_t mode = -1;
  bool background = false;
};

// Calls of banks whose plans have much in common with those before.
std::vector<BankCall> draw_calls(const PlanCase& group, int32_t num_banks, int32_t count,
                                 Random& random) {
  std::vector<PlanCase> planned(num_banks, group);
  for (PlanCase& plan : planned) plan.clear();
  std::vector<BankCall> calls;
  uint64_t version = 0;
  for (int32_t i = 0; i < count; ++i) {
    version += draw(random, 0, 5) == 0;
    PlanCase& plan = planned[draw(random, 0, num_banks - 1)];
    for (int32_t& expert : plan.slot_expert)
      if (draw(random, 0, 3) == 0) expert = -1;
    for (int32_t n = draw(random, 0, 6); n > 0; --n)
      plan.place(draw(random, 0, group.num_experts - 1), draw(random, 0, group.num_ranks - 1));
    const auto bank = static_cast<int32_t>(&plan - planned.data());
    calls.push_back({bank == 0 && draw(random, 0, 5) == 0 ? -1 : bank, plan.slot_expert, version,
                     draw(random, -1, 2), draw(random, 0, 1) == 1});
  }
  return calls;
}

void run(const PlanCase& group, const GroupOptions& options, const std::vector<BankCall>& calls) {
  Ranks ranks(group, options);
  int64_t expert_bytes = 0;
  std::vector<int32_t> segments;
  for (const int64_t bytes : options.segment_bytes) {
    segments.push_back(static_cast<int32_t>(segments.size()));
    expert_bytes += bytes;
  }
  const Payload payload(*std::max_element(options.segment_bytes.begin(),  //
                                          options.segment_bytes.end()));
  const auto weights = ranks.make_weights();
  const size_t slots = group.slot_expert.size();
  std::atomic<int64_t> moved{0};
  ranks.on_each([&](int32_t rank) {
    uec::host::Engine& engine = ranks.engine(rank);
    ranks.fill_slots(rank);
    ranks.fill_weights(rank, weights[rank].get(), payload, 0);
    const std::vector<uint64_t> main_ptrs = ranks.addresses(rank, weights[rank].get());
    uint64_t version = 0;
    struct Held {
      int32_t expert = -1;
      uint64_t version = 0;
    };
    std::vector<std::vector<Held>> held(options.num_banks, std::vector<Held>(slots));
    std::vector<std::vector<int32_t>> residents(options.num_banks, std::vector<int32_t>(slots, -1));
    std::vector<uint64_t> versions(options.num_banks, 0);
    for (const BankCall& call : calls) {
      if (call.version != version)  // all that read them have finished
        ranks.fill_weights(rank, weights[rank].get(), payload, version = call.version);
      const int32_t bank = std::max(call.bank, 0);
      auto& resident = residents[bank];
      if (call.bank < 0 || versions[bank] != version) resident.assign(slots, -1);
      if (call.bank >= 0) versions[bank] = version;
      Mode chosen;
      wait_ok(engine, engine.replicate({.slot_expert = call.slot_expert.data(),
                                        .plan_digest = 0,
                                        .main_ptrs = main_ptrs.data(),
                                        .segments = segments.data(),
                                        .num_segments = static_cast<int32_t>(segments.size()),
                                        .mode = call.mode,
                                        .region = 0,
                                        .bank = {.index = call.bank, .version = version}},
                                       call.background, &chosen));
      for (size_t at = 0; at < slots; ++at) {
        const int32_t expert = call.slot_expert[at];
        if (expert < 0) continue;
        if (rank == 0 && resident[at] != expert) moved += expert_bytes;
        held[bank][at] = {expert, version};
      }
      for (size_t at = 0; at < slots && call.bank >= 0; ++at) {
        const int32_t expert = call.slot_expert[at];
        if (expert < 0) continue;
        const auto row = resident.begin() + at / group.slots_per_rank * group.slots_per_rank;
        std::replace(row, row + group.slots_per_rank, expert, -1);  // one of a rank
        resident[at] = expert;
      }
      CHECK(engine.residents(bank) == resident);
      for (int32_t b = 0; b < options.num_banks; ++b)
        for (int32_t s = 0; s < group.slots_per_rank; ++s) {
          const Held& now = held[b][rank * group.slots_per_rank + s];
          for (size_t i = 0; i < segments.size(); ++i)
            ranks.check_slot(rank, b * group.slots_per_rank + s, i, now.expert, payload,
                             now.version);
        }
    }
  });
  int64_t stored = 0;
  for (int32_t r = 0; r < group.num_ranks; ++r) stored += ranks.engine(r).bytes_stored();
  CHECK_EQ(stored, moved.load());  // and nothing that was there
}

}  // namespace

int main() {
  for (int32_t seed = 0; seed < scaled(60); ++seed) {
    Random random(static_cast<uint32_t>(seed));
    PlanCase group = make_group(draw(random, 2, 6), draw(random, 2, 12), draw(random, 1, 3));
    if (draw(random, 0, 1) == 1)
      for (int32_t& home : group.home) home = draw(random, 0, group.num_ranks - 1);
    GroupOptions options;
    const std::vector<std::vector<int64_t>> payloads{{100}, {300'000, 7}, {(64 << 10) + 1, 40}};
    options.segment_bytes = payloads[draw(random, 0, 2)];
    options.num_banks = draw(random, 1, 3);
    options.instance_align = draw(random, 0, 1) * 4096;
    options.num_workers = draw(random, 1, 2);
    options.check = draw(random, 0, 2) == 0;
    run(group, options, draw_calls(group, options.num_banks, 20, random));
  }
}
