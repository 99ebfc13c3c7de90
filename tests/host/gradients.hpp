// Gradients of all ranks of a group in one process: callers' inputs, and the results to check.
#pragma once

#include <cstring>
#include <vector>

#include "core/base/digest.hpp"
#include "host/ranks.hpp"
#include "support/check.hpp"
#include "support/numbers.hpp"

// One reduction as every rank makes it.
struct ReductionCase {
  std::vector<int32_t> slot_expert{};
  int32_t mode = -1;
  bool zero = true, background = false;
  uint64_t seed = 0;  // of what is added up

  static constexpr int32_t kPull = static_cast<int32_t>(uec::Mode::kPull);
  static constexpr int32_t kDirect = static_cast<int32_t>(uec::Mode::kDirect);
};

// Values are hashes of where they are and of the reduction: sums round in most places.
class GradientRanks {
 public:
  static constexpr int32_t kMain = -1, kEmpty = -2;  // in the place of a replica's rank

  GradientRanks(const PlanCase& of_group, const GroupOptions& options,
                std::vector<uec::GradType> type_of_mains)
      : group(of_group), ranks(of_group, options), main_type(std::move(type_of_mains)) {
    for (int32_t r = 0; r < group.num_ranks; ++r) {
      main_grads.emplace_back();
      for (size_t i = 0; i < num_segments(); ++i)
        for (int32_t m = 0; m < ranks.layout().num_local_experts[r]; ++m)
          main_grads.back().emplace_back(elements(i) * bytes_of(main_type[i]));
    }
  }

  size_t num_segments() const { return ranks.options().grad_bytes.size(); }
  int64_t elements(size_t segment) const {
    return ranks.options().grad_bytes[segment] / bytes_of(type(segment));
  }
  uec::GradType type(size_t segment) const { return ranks.options().grad_type[segment]; }
  uint8_t* main(int32_t expert, size_t segment) {
    const int32_t home = group.home[expert];
    return main_grads[home][segment * ranks.layout().num_local_experts[home] +
                            ranks.layout().local_idx[expert]]
        .data();
  }
  int32_t expert_in(const ReductionCase& call, int32_t rank, int32_t slot) const {
    return call.slot_expert[rank * group.slots_per_rank + slot];
  }

  // The value as rounded to `type`.
  static float value(uint64_t seed, int32_t expert, int32_t replica, size_t segment, int64_t i,
                     uec::GradType type) {
    const uint64_t place = uec::mix(uec::mix(uec::mix(seed, expert), replica + 2), segment);
    const auto bits = static_cast<uint32_t>(uec::mix(place, i));
    // From 2^-12 to 2^3, either sign.
    const uint32_t exponent = 115 + bits % 16;
    const float full =
        __builtin_bit_cast(float, (bits & 0x80000000) | exponent << 23 | (bits >> 4 & 0x7FFFFF));
    return type == uec::GradType::kFloat32 ? full : uec::from_bfloat16(uec::to_bfloat16(full));
  }

  void fill(int32_t rank, const ReductionCase& call) {
    for (size_t i = 0; i < num_segments(); ++i) {
      for (int32_t s = 0; s < group.slots_per_rank; ++s) {
        const int32_t expert = expert_in(call, rank, s);
        write(ranks.slot_grad(rank, s, i), i, type(i), call.seed, expert >= 0 ? expert : s,
              expert >= 0 ? rank : kEmpty);
      }
      for (int32_t e = 0; e < group.num_experts; ++e)
        if (group.home[e] == rank) write(main(e, i), i, main_type[i], call.seed, e, kMain);
    }
  }

  uint64_t submit(int32_t rank, const ReductionCase& call) {
    std::vector<uint64_t> addresses;
    for (std::vector<uint8_t>& gradient : main_grads[rank])
      addresses.push_back(reinterpret_cast<uint64_t>(gradient.data()));
    uec::Mode mode;
    return ranks.engine(rank).reduce({.slot_expert = call.slot_expert.data(),
                                      .plan_digest = 0,
                                      .main_ptrs = addresses.data(),
                                      .main_type = main_type.data(),
                                      .mode = call.mode,
                                      .zero = call.zero},
                                     call.background, &mode);
  }

  // Checks the results of a call, byte for byte.
  void check(int32_t rank, const ReductionCase& call) {
    for (size_t i = 0; i < num_segments(); ++i) {
      for (int32_t e = 0; e < group.num_experts; ++e)
        if (group.home[e] == rank) check_main(e, i, call);
      for (int32_t s = 0; s < group.slots_per_rank; ++s) check_slot(rank, s, i, call);
    }
  }

  // Uses what a finished call allows: the caller may rewrite its slot and main gradients.
  void spoil(int32_t rank) {
    for (size_t i = 0; i < num_segments(); ++i)
      std::memset(ranks.slot_grad(rank, 0, i), 0x7F,
                  group.slots_per_rank * ranks.options().grad_bytes[i]);
    for (std::vector<uint8_t>& gradient : main_grads[rank])
      std::memset(gradient.data(), 0x7F, gradient.size());
  }

  PlanCase group;
  Ranks ranks;
  std::vector<uec::GradType> main_type;
  std::vector<std::vector<std::vector<uint8_t>>> main_grads;  // [ranks][segments * M]

 private:
  void write(uint8_t* to, size_t segment, uec::GradType type, uint64_t seed, int32_t expert,
             int32_t replica) const {
    for (int64_t i = 0; i < elements(segment); ++i)
      put_number(to, i, type, value(seed, expert, replica, segment, i, type));
  }

  void check_main(int32_t expert, size_t segment, const ReductionCase& call) {
    std::vector<int32_t> replicas;  // ranks, ascending
    for (size_t i = 0; i < call.slot_expert.size(); ++i)
      if (call.slot_expert[i] == expert)
        replicas.push_back(static_cast<int32_t>(i) / group.slots_per_rank);
    const uec::GradType held = main_type[segment];
    std::vector<uint8_t> right(elements(segment) * bytes_of(held));
    for (int64_t i = 0; i < elements(segment); ++i) {
      const auto part = [&](int32_t rank) {
        return value(call.seed, expert, rank, segment, i, type(segment));
      };
      float sum = value(call.seed, expert, kMain, segment, i, held);
      if (!replicas.empty()) {
        float parts = part(replicas[0]);
        for (size_t r = 1; r < replicas.size(); ++r) parts += part(replicas[r]);
        sum += parts;
      }
      put_number(right.data(), i, held, sum);
    }
    CHECK(std::memcmp(main(expert, segment), right.data(), right.size()) == 0);
  }

  void check_slot(int32_t rank, int32_t slot, size_t segment, const ReductionCase& call) {
    const int32_t expert = expert_in(call, rank, slot);
    if (expert >= 0 && !call.zero && type(segment) == uec::GradType::kFloat32)
      return;  // it may hold sums
    std::vector<uint8_t> right(ranks.options().grad_bytes[segment]);
    if (expert < 0 || !call.zero)
      write(right.data(), segment, type(segment), call.seed, expert >= 0 ? expert : slot,
            expert >= 0 ? rank : kEmpty);
    CHECK(std::memcmp(ranks.slot_grad(rank, slot, segment), right.data(), right.size()) == 0);
  }
};
