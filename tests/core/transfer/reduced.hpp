// Reductions over plain memory, by the reducers of all ranks in any order, and what they must leave
// behind: every main gradient equals main + (r1 + r2 + ... + rn), rounded once, bit for bit.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "core/reduce_cases.hpp"
#include "core/transfer/announce.hpp"
#include "core/transfer/layout.hpp"
#include "core/transfer/reducer.hpp"
#include "support/check.hpp"
#include "support/numbers.hpp"
#include "support/stripes.hpp"

namespace reducing {

using uec::GradType;
using uec::Step;

inline constexpr uint64_t kEpoch = 5;

// Flags and counters work as on the host. Every flag is published once.
template <class TheTeam>
class PlainMemory {
 public:
  using Team = TheTeam;
  PlainMemory(uint8_t* const* bases, int32_t rank) : bases_(bases), rank_(rank) {}

  uint64_t observe(int64_t offset) const {
    return word(rank_, offset).load(std::memory_order_acquire);
  }
  void publish(uec::Delivered, int32_t rank, int64_t offset, uint64_t value) const {
    CHECK(word(rank, offset).exchange(value, std::memory_order_release) != value);
  }
  static bool flags_delivered() { return true; }
  static bool peer_gone(int32_t) { return false; }
  static int32_t arrive(uec::Delivered, int32_t* counter, int32_t n) {
    return std::atomic_ref(*counter).fetch_add(n, std::memory_order_acq_rel) + n;
  }

 private:
  std::atomic_ref<uint64_t> word(int32_t rank, int64_t offset) const {
    return std::atomic_ref(*reinterpret_cast<uint64_t*>(bases_[rank] + offset));
  }

  uint8_t* const* bases_;
  int32_t rank_;
};

// Members of a team take elements in turn.
template <class Team>
class PlainAdder : public uec::DeliveryPolicy {
 public:
  template <class Source>
  void sum(uint8_t* to, int32_t n, Source&& source, int64_t elements, GradType type) {
    for (int64_t i = team_.index(); i < elements; i += team_.size())
      put_number(to, i, GradType::kFloat32, sum_at(n, source, i, type));
  }
  template <class Source>
  void add(uint8_t* main, GradType main_type, int32_t n, Source&& source, int64_t elements,
           GradType type) {
    for (int64_t i = team_.index(); i < elements; i += team_.size())
      put_number(main, i, main_type, number_at(main, i, main_type) + sum_at(n, source, i, type));
  }
  void zero(uint8_t* to, int64_t bytes) {
    for (int64_t i = team_.index(); i < bytes; i += team_.size()) to[i] = 0;
  }
  bool vacant() { return true; }
  uint32_t ticket() { return 0; }
  template <class F>
  bool try_delivered(uint32_t, F&& then) {
    team_.sync();
    then(delivered());
    return true;
  }
  template <class F>
  bool wait_delivered(uint32_t, bool, F&& then) {  // as a Mover, for the announcements
    return try_delivered(0, then);
  }
  void loads_complete() { team_.sync(); }

 private:
  template <class Source>
  static float sum_at(int32_t n, Source&& source, int64_t i, GradType type) {
    float value = number_at(source(0), i, type);
    for (int32_t s = 1; s < n; ++s) value += number_at(source(s), i, type);
    return value;
  }

  Team team_;
};

struct Rank {
  Rank(const ReduceCase& c, int32_t rank, const uec::SymmetricLayout& layout, int32_t workers)
      : given(c.capacity(rank)), symmetric(layout.total / 8), held(workers) {
    for (int32_t w = 0; w < workers; ++w)
      scratch.emplace_back(c.plan.num_ranks, c.capacity(rank).striped());
    const int32_t num_local_experts = c.plan.num_local_experts()[rank];
    for (int32_t i = 0; i < c.num_segments(); ++i) {
      const int64_t elements = c.grad_bytes[i] / bytes_of(c.grad_type[i]);
      for (int32_t m = 0; m < num_local_experts; ++m)
        main_grads.emplace_back(elements * bytes_of(c.main_type[i]));
    }
  }
  uint8_t* base() { return reinterpret_cast<uint8_t*>(symmetric.data()); }

  Given given;
  std::vector<uint64_t> symmetric;
  std::vector<std::vector<uint8_t>> main_grads;  // [segments * M]
  std::vector<WorkerScratch> scratch;            // [workers]
  std::vector<std::array<uec::UnpublishedGroup, uec::kMaxUnpublished>> held;
};

class Reduced {
 public:
  Reduced(const ReduceCase& drawn, int32_t num_workers, Random& random)
      : c_(drawn), num_workers_(num_workers), random_(random) {
    const std::vector<int32_t> num_local = c_.plan.num_local_experts();
    layout_ = uec::SymmetricLayout::make(
        c_.plan.topology(), *std::max_element(num_local.begin(), num_local.end()), 0, 0, nullptr,
        nullptr, c_.tables(0).grads, c_.tile_bytes, c_.grad_offset.data());
    for (int32_t r = 0; r < c_.plan.num_ranks; ++r) {
      ranks_.push_back(std::make_unique<Rank>(c_, r, layout_, num_workers));
      bases_.push_back(ranks_.back()->base());
      fill(r);
    }
    for (int32_t r = 0; r < c_.plan.num_ranks; ++r) prepare(r);
  }

  // `run(steps)` calls steps(team) in each member of a team.
  template <class Run>
  void run(const Run& run_steps) {
    const std::vector<std::vector<uint8_t>> before = slots();
    std::vector<std::vector<std::vector<uint8_t>>> main_grads;
    for (const auto& rank : ranks_) main_grads.push_back(rank->main_grads);
    const auto seed = static_cast<uint32_t>(random_());
    run_steps([&](auto team) { take_steps(team, seed); });
    for (int32_t r = 0; r < c_.plan.num_ranks; ++r) {
      check_main_grads(r, before, main_grads[r]);
      check_slots(r, before[r]);
    }
  }

 private:
  // Values of all sizes and signs, including zeros and infinities.
  float draw_value() {
    static constexpr float kSpecial[] = {0.0F, -0.0F, 1e-40F, 3e38F, -3e38F, INFINITY};
    if (draw(random_, 0, 99) == 0) return kSpecial[draw(random_, 0, 5)];
    return std::ldexp(static_cast<float>(draw(random_, -4095, 4095)), draw(random_, -12, 12));
  }

  uint8_t* slot(int32_t rank, int32_t idx, int32_t segment) {
    return bases_[rank] + c_.grad_offset[segment] + idx * c_.grad_bytes[segment];
  }
  int64_t elements(int32_t segment) const {
    return c_.grad_bytes[segment] / bytes_of(c_.grad_type[segment]);
  }

  void fill(int32_t rank) {
    for (int32_t i = 0; i < c_.num_segments(); ++i) {
      for (int32_t s = 0; s < c_.plan.slots_per_rank; ++s)
        for (int64_t at = 0; at < elements(i); ++at)
          put_number(slot(rank, s, i), at, c_.grad_type[i], draw_value());
      const int32_t num_local_experts = c_.plan.num_local_experts()[rank];
      for (int32_t m = 0; m < num_local_experts; ++m)
        for (int64_t at = 0; at < elements(i); ++at)
          put_number(ranks_[rank]->main_grads[i * num_local_experts + m].data(), at,
                     c_.main_type[i], draw_value());
    }
  }

  void prepare(int32_t rank) {
    Given& given = ranks_[rank]->given;
    const uint64_t digest = prepare_reduction(uec::SingleThread{}, c_, rank, given);
    uec::Call& call = given.call;
    call.rank = rank;
    call.num_ranks = c_.plan.num_ranks;
    call.layout = layout_;
    call.epoch = {kEpoch, uec::CallRecord::make(kEpoch, digest, uec::RecordKind::kCall)};
    call.addresses.bases = bases_.data();
    call.addresses.num_local_experts = c_.plan.num_local_experts()[rank];
    for (size_t i = 0; i < ranks_[rank]->main_grads.size(); ++i)
      given.arrays.main_ptrs[i] = ranks_[rank]->main_grads[i].data();
    call.reset_counters(uec::SingleThread{});
  }

  std::vector<std::vector<uint8_t>> slots() {
    std::vector<std::vector<uint8_t>> copies;
    for (int32_t r = 0; r < c_.plan.num_ranks; ++r) {
      copies.emplace_back();
      for (int32_t i = 0; i < c_.num_segments(); ++i)
        copies.back().insert(copies.back().end(), slot(r, 0, i),
                             slot(r, c_.plan.slots_per_rank, i));
    }
    return copies;
  }
  // A slot in a copy made by slots().
  const uint8_t* slot_in(const std::vector<uint8_t>& copy, int32_t idx, int32_t segment) const {
    int64_t at = idx * c_.grad_bytes[segment];
    for (int32_t i = 0; i < segment; ++i) at += c_.plan.slots_per_rank * c_.grad_bytes[i];
    return copy.data() + at;
  }

  // In an order that all members share.
  template <class Team>
  void take_steps(Team team, uint32_t seed) {
    using Memory = PlainMemory<Team>;
    using Adder = PlainAdder<Team>;
    using Reducer = uec::Reducer<Memory, Adder>;
    Random random(seed);
    std::vector<Memory> memories;
    std::vector<Adder> adders(c_.plan.num_ranks * num_workers_);
    for (int32_t r = 0; r < c_.plan.num_ranks; ++r) memories.emplace_back(bases_.data(), r);
    std::vector<Reducer> reducers;
    for (int32_t r = 0; r < c_.plan.num_ranks; ++r) {
      uec::announce_call(ranks_[r]->given.call, memories[r], adders[0]);
      uec::announce_open(ranks_[r]->given.call, memories[r], adders[0]);
      for (int32_t w = 0; w < num_workers_; ++w)
        reducers.emplace_back(ranks_[r]->given.call, memories[r], adders[r * num_workers_ + w],
                              ranks_[r]->scratch[w].stripe, ranks_[r]->held[w].data(),
                              uec::Stripe{w, num_workers_});
    }
    std::vector<size_t> running(reducers.size());
    for (size_t i = 0; i < running.size(); ++i) running[i] = i;
    for (int64_t blocked = 0; !running.empty();) {
      const size_t at = draw(random, 0, static_cast<int32_t>(running.size()) - 1);
      const Step step = reducers[running[at]].step();
      CHECK(step == Step::kProgress || step == Step::kWaitsForPeer || step == Step::kFinished);
      blocked = step == Step::kWaitsForPeer ? blocked + 1 : 0;
      CHECK(blocked < 100'000);
      if (step == Step::kFinished) running.erase(running.begin() + static_cast<int64_t>(at));
    }
    team.sync();  // as a block's threads meet before its call ends
    for (int32_t r = 0; r < c_.plan.num_ranks; ++r) {
      uec::Finish<Memory> finish(ranks_[r]->given.call, memories[r]);
      CHECK(finish.step() == Step::kFinished);
    }
  }

  void check_main_grads(int32_t rank, const std::vector<std::vector<uint8_t>>& slots_before,
                        const std::vector<std::vector<uint8_t>>& mains_before) {
    const int32_t num_local_experts = c_.plan.num_local_experts()[rank],
                  num_slots = c_.plan.slots_per_rank;
    for (int32_t e = 0; e < c_.plan.num_experts; ++e)
      for (int32_t i = 0; i < c_.num_segments() && c_.plan.home[e] == rank; ++i) {
        const size_t main = i * num_local_experts + c_.local_idx[e];
        std::vector<uint8_t> right = mains_before[main];
        for (int64_t at = 0; at < elements(i); ++at) {
          float sum = 0;
          bool any = false;
          for (int32_t s = 0; s < c_.plan.num_ranks * num_slots; ++s) {
            if (c_.plan.slot_expert[s] != e) continue;
            const float part = number_at(slot_in(slots_before[s / num_slots], s % num_slots, i), at,
                                         c_.grad_type[i]);
            sum = any ? sum + part : part;
            any = true;
          }
          if (!any) break;
          const float value = number_at(right.data(), at, c_.main_type[i]) + sum;
          put_number(right.data(), at, c_.main_type[i], value);
          if (std::isnan(value)) {  // of many bits
            const float found =
                number_at(ranks_[rank]->main_grads[main].data(), at, c_.main_type[i]);
            CHECK(std::isnan(found));
            put_number(right.data(), at, c_.main_type[i], found);
          }
        }
        CHECK(ranks_[rank]->main_grads[main] == right);
      }
  }

  void check_slots(int32_t rank, const std::vector<uint8_t>& before) {
    for (int32_t s = 0; s < c_.plan.slots_per_rank; ++s)
      for (int32_t i = 0; i < c_.num_segments(); ++i) {
        const bool filled = c_.plan.slot_expert[rank * c_.plan.slots_per_rank + s] >= 0;
        const bool in_place = c_.grad_type[i] == GradType::kFloat32;
        if (filled && !c_.zero && in_place) continue;  // it may hold sums
        const std::vector<uint8_t> zeros(c_.grad_bytes[i]);
        const uint8_t* const right = filled && c_.zero ? zeros.data() : slot_in(before, s, i);
        CHECK(std::memcmp(slot(rank, s, i), right, c_.grad_bytes[i]) == 0);
      }
  }

  ReduceCase c_;
  int32_t num_workers_;
  Random& random_;
  uec::SymmetricLayout layout_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::vector<uint8_t*> bases_;
};

// A tile of a few elements in each of many segments: small, and yet of several groups.
inline ReduceCase draw_reduction(Random& random, int32_t max_ranks) {
  ReduceCase c(draw_case(random, max_ranks));
  c.tile_bytes = draw(random, 0, 2) == 0 ? 2 << 10 : 32 << 10 << draw(random, 0, 1);
  const int64_t sizes[] = {4, 100, 520, 1'028, 2'052};
  for (int32_t i = draw(random, 1, 6); i > 0; --i)
    c.add_segment(sizes[draw(random, 0, 4)], static_cast<GradType>(draw(random, 0, 1)),
                  static_cast<GradType>(draw(random, 0, 1)));
  if (draw(random, 0, 15) == 0) c.add_segment((96 << 10) + 4, c.grad_type[0], c.main_type[0]);
  c.mode = draw(random, 0, 1) == 0 ? static_cast<int32_t>(uec::Mode::kPull)
                                   : static_cast<int32_t>(uec::Mode::kDirect);
  c.zero = draw(random, 0, 1) == 1;
  return c;
}

}  // namespace reducing
