// The host engine moves the right bytes: every mode, many plans, ranks that run ahead of others.
#include <chrono>
#include <cstdlib>
#include <thread>
#include <vector>

#include "host/engine.hpp"
#include "host/ranks.hpp"
#include "support/check.hpp"
#include "support/plans.hpp"

namespace {

using uec::Mode;
using uec::ReplicateArgs;

constexpr int32_t kAuto = -1;

// One call as every rank makes it.
struct CallCase {
  std::vector<int32_t> slot_expert, segments;
  int32_t mode = kAuto;
  bool gather = false, background = false;
  size_t weights = 0;  // which set of main weights
};

// A rank's state between its calls: what its slots must hold.
struct Held {
  int32_t expert = -1;
  uint64_t seed = 0;
};

class Run {
 public:
  Run(const PlanCase& group, const GroupOptions& options, Random& random)
      : group_(group), ranks_(group, options), payload_(max_segment(options)) {
    for (size_t i = 0; i < kSets; ++i) weights_.push_back(ranks_.make_weights());
    rows_.resize(group.num_ranks * group.num_experts);
    for (int32_t& count : rows_) count = draw(random, 0, 1 << 30);
  }

  // Every rank makes all calls on its own thread, checks each, and runs ahead of its peers as far
  // as the protocol lets it.
  void in_threads(const std::vector<CallCase>& calls, uint64_t salt) {
    ranks_.on_each([&](int32_t rank) {
      Random random(static_cast<uint32_t>(salt * 64 + rank));
      std::vector<std::vector<Held>> held(ranks_.num_segments(),
                                          std::vector<Held>(group_.slots_per_rank));
      for (size_t k = 0; k < calls.size(); ++k) {
        if (draw(random, 0, 7) == 0)
          std::this_thread::sleep_for(std::chrono::microseconds(draw(random, 0, 2000)));
        std::vector<int32_t> table(rows_.size(), -1);
        if (k == 0 || draw(random, 0, 3) == 0) {  // ours to write between calls
          ranks_.fill_slots(rank);
          for (auto& slots : held) slots.assign(slots.size(), {});
        }
        const uint64_t epoch = submit(calls[k], rank, salt + k, table.data());
        wait_ok(ranks_.engine(rank), epoch);
        CHECK(ranks_.engine(rank).is_completed(epoch));
        if (calls[k].gather) CHECK(table == rows_);
        note(calls[k], rank, salt + k, held);
        check_slots(rank, held);
      }
    });
  }

  // One thread submits up to the engine's depth on every rank before it waits for any.
  void ahead(const std::vector<CallCase>& calls, uint64_t salt, Random& random) {
    CHECK(calls.size() <= 4);
    std::vector<int32_t> order(group_.num_ranks);
    for (int32_t r = 0; r < group_.num_ranks; ++r) order[r] = r;
    std::shuffle(order.begin(), order.end(), random);
    std::vector<std::vector<int32_t>> tables(group_.num_ranks * calls.size());
    std::vector<uint64_t> epochs(tables.size());
    for (const int32_t rank : order) {
      ranks_.fill_slots(rank);
      for (size_t k = 0; k < calls.size(); ++k) {
        auto& table = tables[rank * calls.size() + k];
        table.assign(rows_.size(), -1);
        CallCase call = calls[k];
        call.background = true;
        epochs[rank * calls.size() + k] = submit(call, rank, salt + k, table.data());
      }
    }
    std::shuffle(order.begin(), order.end(), random);
    for (const int32_t rank : order) {
      std::vector<std::vector<Held>> held(ranks_.num_segments(),
                                          std::vector<Held>(group_.slots_per_rank));
      for (size_t k = calls.size(); k-- > 0;)
        wait_ok(ranks_.engine(rank), epochs[rank * calls.size() + k]);
      for (size_t k = 0; k < calls.size(); ++k) {
        if (calls[k].gather) CHECK(tables[rank * calls.size() + k] == rows_);
        note(calls[k], rank, salt + k, held);
      }
      check_slots(rank, held);
    }
  }

  void close() {
    for (int32_t r = 0; r < group_.num_ranks; ++r) CHECK_EQ(ranks_.engine(r).close(), -1);
  }

 private:
  static constexpr size_t kSets = 4;

  static int64_t max_segment(const GroupOptions& options) {
    return *std::max_element(options.segment_bytes.begin(), options.segment_bytes.end());
  }

  uint64_t submit(const CallCase& call, int32_t rank, uint64_t seed, int32_t* table) {
    uec::host::Engine& engine = ranks_.engine(rank);
    if (call.gather)
      return engine.gather(rows_.data() + rank * group_.num_experts, table, call.background);
    // No rank reads these any more: this rank's last call with them has finished.
    uint8_t* const region = weights_[call.weights][rank].get();
    ranks_.fill_weights(rank, region, payload_, seed);
    const std::vector<uint64_t> main_ptrs = ranks_.addresses(rank, region);
    const bool may_pull = call.mode == static_cast<int32_t>(Mode::kPull) || call.mode == kAuto;
    const ReplicateArgs args{.slot_expert = call.slot_expert.data(),
                             .plan_digest = 0,
                             .main_ptrs = main_ptrs.data(),
                             .segments = call.segments.data(),
                             .num_segments = static_cast<int32_t>(call.segments.size()),
                             .mode = call.mode,
                             .region = may_pull ? static_cast<int32_t>(call.weights) : -1};
    Mode mode = Mode::kDirect;
    const uint64_t epoch = engine.replicate(args, call.background, &mode);
    CHECK(call.mode == kAuto || call.mode == static_cast<int32_t>(mode));
    return epoch;
  }

  void note(const CallCase& call, int32_t rank, uint64_t seed,
            std::vector<std::vector<Held>>& held) const {
    if (call.gather) return;
    for (const int32_t segment : call.segments)
      for (int32_t i = 0; i < group_.slots_per_rank; ++i) {
        const int32_t expert = call.slot_expert[rank * group_.slots_per_rank + i];
        if (expert >= 0) held[segment][i] = {expert, seed};
      }
  }

  void check_slots(int32_t rank, const std::vector<std::vector<Held>>& held) {
    for (size_t segment = 0; segment < held.size(); ++segment)
      for (int32_t i = 0; i < group_.slots_per_rank; ++i)
        ranks_.check_slot(rank, i, segment, held[segment][i].expert, payload_,
                          held[segment][i].seed);
  }

  PlanCase group_;
  Ranks ranks_;
  Payload payload_;
  std::vector<decltype(ranks_.make_weights())> weights_;
  std::vector<int32_t> rows_;  // [G][E] what each rank gathers
};

GroupOptions draw_options(Random& random) {
  GroupOptions options;
  const int64_t tiles[] = {1 << 10, 32 << 10, 64 << 10, 96 << 10};
  options.tile_bytes = tiles[draw(random, 0, 3)];
  const int64_t tile = options.tile_bytes;
  const int64_t sizes[] = {1, 3, 100, tile - 1, tile, tile + 1, 2 * tile + 17, (256 << 10) + 5};
  options.segment_bytes.clear();
  const int32_t num_segments = draw(random, 1, 3);
  for (int32_t i = 0; i < num_segments; ++i)
    options.segment_bytes.push_back(sizes[draw(random, 0, 7)]);
  options.num_workers = draw(random, 1, 3);
  return options;
}

std::vector<CallCase> draw_calls(PlanCase& group, size_t num_segments, size_t count,
                                 Random& random) {
  std::vector<CallCase> calls;
  for (size_t k = 0; k < count; ++k) {
    draw_plan(group, random);
    CallCase call{.slot_expert = group.slot_expert, .segments = {}};
    for (size_t i = 0; i < num_segments; ++i)
      if (draw(random, 0, 3) != 0) call.segments.push_back(static_cast<int32_t>(i));
    if (call.segments.empty()) call.segments.push_back(0);
    call.mode = draw(random, kAuto, uec::kNumModes - 1);
    call.gather = draw(random, 0, 4) == 0;
    call.background = draw(random, 0, 2) == 0;
    call.weights = k % 4;
    calls.push_back(std::move(call));
  }
  return calls;
}

// Random groups, plans, modes and orders.
void check_random(int repeats, uint32_t seed) {
  Random random(seed);
  for (int repeat = 0; repeat < repeats; ++repeat) {
    PlanCase group = draw_case(random, 8);
    const GroupOptions options = draw_options(random);
    Run run(group, options, random);
    const size_t num_segments = options.segment_bytes.size();
    run.in_threads(draw_calls(group, num_segments, 8, random), 1000);
    for (uint64_t salt = 2000; salt < 2030; salt += 10)
      run.ahead(draw_calls(group, num_segments, 1 + salt % 4, random), salt, random);
    run.in_threads(draw_calls(group, num_segments, 4, random), 3000);
    run.close();
  }
}

// Wider than a flag group's switch of grain at 16 replicas, more ranks than cores.
void check_wide() {
  Random random(4);
  for (const Mode mode : {Mode::kPush, Mode::kPull}) {
    PlanCase group = make_group(18, 18, 1);
    for (int32_t rank = 1; rank < 18; ++rank) CHECK(group.place(0, rank));
    Run run(group, {.segment_bytes = {(1 << 20) + 1, 1}}, random);
    const CallCase call{
        .slot_expert = group.slot_expert, .segments = {0, 1}, .mode = static_cast<int32_t>(mode)};
    run.in_threads({call, call}, 1);
    run.close();
  }
}

}  // namespace

// test_engine [repeats [seed]]: for longer runs by hand.
int main(int argc, char** argv) {
  check_wide();
  check_random(argc > 1 ? std::atoi(argv[1]) : scaled(160), argc > 2 ? std::atoi(argv[2]) : 2024);
}
