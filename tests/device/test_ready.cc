// A kernel of a user's that waits for single slots (ready.cuh), beside the call that fills them:
// examples/slot_by_slot, on the PTX machine as nvcc compiled it.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include "../../examples/slot_by_slot/slot_gemm.h"
#include "cuda/device/ready.cuh"
#include "device/failures.hpp"
#include "support/watchdog.hpp"

namespace {

using namespace device_tests;

constexpr int32_t kTokens = 2, kN = 3;
// Its waits have no limit, and its arguments are not in a struct.
const bool kIsTriton = std::getenv("UEC_SLOT_GEMM_TRITON") != nullptr;

class Consumers : public EmulatedGroup {
 public:
  Consumers(const PlanCase& group, const Options& options)
      : EmulatedGroup(group, options), k_(static_cast<int32_t>(options.segment_bytes[0]) / kN) {
    for (int32_t i = 0; i < kTokens * k_; ++i) tokens_.push_back(static_cast<int8_t>(i % 5 - 2));
    if (const auto* const machine = ptx_machine::Client::instance())
      for (int32_t r = 0; r < group.num_ranks; ++r)
        machine->memory(rank_banks_[r].ready, 8 * options.num_banks * group.slots_per_rank, r);
  }

  void prepare_bank(int32_t bank, const std::vector<int32_t>& slot_expert) {
    if (call_ == 0) weights_ = 1;
    ++call_;
    bank_ = bank;
    selected_ = {0};
    group().slot_expert = slot_expert;
    for (int32_t r = 0; r < group().num_ranks; ++r) prepare_rank(r, Mode::kPush, slot_expert);
  }

  uint64_t* ready(int32_t rank) {
    return rank_banks_[rank].ready + std::max(bank_, 0) * group().slots_per_rank;
  }

  // By the slots of `rank` that the plan fills, or by one of them. The outputs of those that were
  // not there are 0. `blocks`: for each slot.
  std::vector<int32_t> run_consumer(int32_t rank, uint64_t number, uint64_t timeout_ns,
                                    int32_t only = -1, int32_t blocks = 1) {
    std::vector<int32_t> used;
    const int32_t slots = group().slots_per_rank;
    for (int32_t s = 0; s < slots; ++s)
      if (group().slot_expert[rank * slots + s] >= 0 && (only < 0 || s == only)) used.push_back(s);
    std::vector<int32_t> out(slots * kTokens * kN, 0);
    if (used.empty()) return out;
    SlotGemm args{.ready = ready(rank),
                  .slots = reinterpret_cast<int8_t*>(slot(rank, 0, std::max(bank_, 0) * slots)),
                  .tokens = tokens_.data(),
                  .out = out.data(),
                  .slots_used = used.data(),
                  .number = number,
                  .timeout_ns = timeout_ns,
                  .num_tokens = kTokens,
                  .n = kN,
                  .k = k_,
                  .blocks_per_slot = blocks};
    const emulation::Grid grid{.blocks = static_cast<int32_t>(used.size()) * blocks,
                               .warps = 1,
                               .first_rank = rank,
                               .together = blocks > 1,  // a persistent one
                               .beside = true};
    void* const one[] = {&args};
    uint64_t none = 0;  // of Triton's scratch memory
    void* const each[] = {&args.ready,  &args.slots,      &args.tokens, &args.out, &args.slots_used,
                          &args.number, &args.num_tokens, &args.n,      &args.k,   &none,
                          &none};
    begun.fetch_add(1, std::memory_order_relaxed);
    emulation::launch(
        "slot_gemm", const_cast<void**>(kIsTriton ? each : one), grid, [&](std::byte*) {
          const int32_t at = used[uec::ptx::block_x()];
          const bool is_there = uec::cuda::wait_slot(args.ready, at, number, timeout_ns);
          if (is_there && uec::ptx::thread_idx() == 0)
            gemm(args.slots + int64_t{at} * kN * k_, &out[at * kTokens * kN]);
        });
    return out;
  }

  // What it has to find in a slot with this expert.
  std::vector<int32_t> expected(int32_t rank) const {
    const int32_t slots = group_.slots_per_rank;
    std::vector<int32_t> out(slots * kTokens * kN, 0);
    std::vector<int8_t> weights(kN * k_);
    for (int32_t s = 0; s < slots; ++s) {
      const int32_t expert = group_.slot_expert[rank * slots + s];
      if (expert < 0) continue;
      for (int32_t i = 0; i < kN * k_; ++i)
        weights[i] = static_cast<int8_t>(payload(weights_, expert, 0, i));
      gemm(weights.data(), &out[s * kTokens * kN]);
    }
    return out;
  }

  void check_rank(int32_t) override {}  // the consumers do

  // A call of one rank that is launched once `consumers` of them have been.
  void launch_behind(uint32_t consumers, int32_t rank, int32_t blocks) {
    while (begun.load(std::memory_order_relaxed) < consumers) Fibers::yield();
    launch_ranks(blocks, rank, 1);
  }

  std::atomic<uint32_t> begun{0};  // consumers

 private:
  void gemm(const int8_t* weights, int32_t* out) const {
    for (int32_t i = 0; i < kTokens * kN; ++i)
      for (int32_t k = 0; k < k_; ++k)
        out[i] += weights[i % kN * k_ + k] * tokens_[i / kN * k_ + k];
  }

  int32_t k_;
  std::vector<int8_t> tokens_;
};

Options small() {
  Options options;
  options.segment_bytes = {int64_t{kN} * 6000};  // a tile and a bit
  options.call_timeout = options.wait_timeout = 20;
  options.plans = Plans::kOnDevice;
  options.num_banks = 2;
  return options;
}

// A consumer for each rank runs beside its call, and never reads what is not there yet.
void check_beside_calls(uint32_t seed) {
  Random random(seed);
  PlanCase group = make_group(draw(random, 2, 3), draw(random, 3, 6), draw(random, 1, 2));
  Options options = small();
  if (draw(random, 0, 1) == 0) options.plans = Plans::kOnHost;
  const int32_t bank = options.plans == Plans::kOnHost ? -1 : draw(random, 0, 1);
  Consumers ranks(group, options);
  for (uint64_t call = 1; call <= 4; ++call) {
    draw_plan(group, random);
    ranks.prepare_bank(bank, group.slot_expert);
    std::vector<std::vector<int32_t>> found(group.num_ranks);
    Fibers threads;
    threads.spawn([&] { ranks.launch_apart(draw(random, 1, 2)); });
    for (int32_t r = 0; r < group.num_ranks; ++r)
      threads.spawn([&, r] { found[r] = ranks.run_consumer(r, call, 0); });
    threads.wait();
    ranks.check_states();
    for (int32_t r = 0; r < group.num_ranks; ++r) CHECK(found[r] == ranks.expected(r));
  }
}

// Expert 0 is in rank 1's slot already, and expert 2 cannot come: its home is not launched. What is
// there is published at once, and waits for what has not arrived are bounded.
void check_what_is_there() {
  PlanCase group = make_group(3, 3, 2);
  Options options = small();
  options.call_timeout = options.wait_timeout = 2;
  Consumers ranks(group, options);
  ranks.prepare_bank(1, {-1, -1, 0, -1, -1, -1});
  ranks.launch(1);
  ranks.check_states();
  ranks.prepare_bank(1, {-1, -1, 0, 2, -1, -1});
  std::vector<int32_t> early, late;
  Fibers threads;
  threads.spawn([&] { ranks.launch(1, 2); });  // rank 2 is missing
  threads.spawn([&] {
    early = ranks.run_consumer(1, 2, 20'000'000'000, 0);
    late = ranks.run_consumer(1, 2, 20'000'000, 1);
  });
  threads.wait();
  std::vector<int32_t> there = ranks.expected(1);
  std::fill_n(there.begin() + kTokens * kN, kTokens * kN, 0);
  CHECK(early == there);
  CHECK(late == std::vector<int32_t>(late.size(), 0));
  // The call has failed: all are let go.
  for (int32_t s = 0; s < 2; ++s) CHECK_EQ(ranks.ready(1)[s], uec::cuda::kGroupFailed);
  for (int32_t s = 0; s < 2; ++s) CHECK_EQ(ranks.ready(2)[s], uint64_t{0});
}

// Replays have no number: words are cleared, and 0 is waited for.
void check_replays() {
  PlanCase group = make_group(2, 2, 1);
  CHECK(group.place(0, 1));
  Options options = small();
  Consumers ranks(group, options);
  for (int replay = 0; replay < 3; ++replay) {
    ranks.ready(1)[0] = 0;
    ranks.prepare_bank(0, group.slot_expert);
    std::vector<int32_t> found;
    Fibers threads;
    threads.spawn([&] { ranks.launch(1, 0, false); });
    threads.spawn([&] { found = ranks.run_consumer(1, 0, 0); });
    threads.wait();
    CHECK(found == ranks.expected(1));
    CHECK_EQ(ranks.ready(1)[0], uint64_t{1});  // not above 1, as by the first call with a number
  }
  // No kernel waits for words that a stream clears on a failed rank.
  ranks.state(1).failed = ranks.state(1).failure_published = 1;
  ranks.ready(1)[0] = 0;
  ranks.launch(1, 0, false);
  CHECK_EQ(ranks.ready(1)[0], uec::cuda::kGroupFailed);
}

// A call of each rank with so many blocks behind a GEMM that keeps so many multiprocessors until
// its slot is there, or for `timeout_ns`: ranks of more than one number each.
void check_beside_a_gemm(const std::vector<int32_t>& blocks, const std::vector<int32_t>& gemm,
                         uint64_t timeout_ns) {
  const auto count = static_cast<int32_t>(blocks.size());
  PlanCase group = make_group(count, count, 1);
  for (int32_t r = 0; r < count; ++r) CHECK(group.place((r + 1) % count, r));
  Options options = small();
  options.max_blocks = *std::max_element(blocks.begin(), blocks.end());
  Consumers ranks(group, options);
  ranks.prepare_bank(0, group.slot_expert);
  std::vector<std::vector<int32_t>> found(count);
  const auto consumers = static_cast<uint32_t>(count - std::count(gemm.begin(), gemm.end(), 0));
  Fibers threads;
  for (int32_t r = 0; r < count; ++r) {
    threads.spawn([&, r] { ranks.launch_behind(consumers, r, blocks[r]); });
    if (gemm[r] > 0)
      threads.spawn([&, r] { found[r] = ranks.run_consumer(r, 1, timeout_ns, -1, gemm[r]); });
  }
  threads.wait();
  ranks.check_states();
  for (int32_t r = 0; r < count; ++r) {
    if (timeout_ns == 0 && gemm[r] > 0) CHECK(found[r] == ranks.expected(r));
    ranks.check_slots(r);
  }
}

std::vector<int32_t> numbers(const char* list) {
  std::vector<int32_t> found;
  std::istringstream text(list);
  for (std::string one; std::getline(text, one, ',');) found.push_back(std::stoi(one));
  return found;
}

}  // namespace

int main(int argc, char** argv) {
  const Watchdog watchdog("a slot that is never there");
  if (argc == 4) {
    check_beside_a_gemm(numbers(argv[1]), numbers(argv[2]), std::stoull(argv[3]));
    return 0;
  }
  for (uint32_t seed = 0; seed < static_cast<uint32_t>(scaled(24)); ++seed)
    check_beside_calls(seed);
  if (!kIsTriton) check_what_is_there();
  check_replays();
}
