// Gradient reductions of a loopback group on the emulated device, and a check of every number
// against main + (r1 + r2 + ... + rn).
#pragma once

#include <bit>
#include <map>
#include <utility>

#include "core/transfer/prepare.hpp"
#include "cuda/device/reduce.cuh"
#include "device/emulated_group.hpp"
#include "support/numbers.hpp"

namespace device_tests {

using uec::GradType;

struct Reducing {
  int32_t mode = -1;  // a Mode, or -1: by cost
  bool zero = true;
  int32_t bank = -1;  // of plans on the device
};

class EmulatedGradients : public EmulatedGroup {
 public:
  // `skew`: elements that main gradients begin behind an aligned address.
  EmulatedGradients(const PlanCase& group, const Options& options,
                    const std::vector<GradType>& main_type, int64_t skew)
      : EmulatedGroup(group, options), main_type_(main_type), skew_(skew) {
    for (int32_t r = 0; r < group.num_ranks; ++r) {
      addresses_.emplace_back();
      for (int32_t i = 0; i < num_grads(); ++i)
        for (int32_t m = 0; m < layouts_[r].num_local_experts[r]; ++m) {
          const int64_t size = uec::bytes_of(main_type[i]);
          buffers_.push_back(std::make_unique<Buffer>(elements(i) * size, skew * size));
          addresses_[r].push_back(buffers_.back()->data());
        }
      addresses_[r].push_back(nullptr);  // there is an address to give
    }
  }

  // Gives every rank its next call: fresh gradients everywhere.
  void prepare_sums(const Reducing& how) {
    begin_call();
    how_ = how;
    bank_ = how.bank;
    for (int32_t r = 0; r < group_.num_ranks; ++r) {
      fill_rank(r);
      prepare_sum(r, how, group_.slot_expert);
    }
    for (int32_t r = 0; r < group_.num_ranks; ++r) expect(r);
  }

  // One rank calls differently.
  void disagree_on_sums(int32_t rank, const Reducing& how) {
    prepare_sum(rank, how, group_.slot_expert);
  }

  bool reduces = true;  // false: launches are transfers
  int32_t adding_warps = 2;

 private:
  using Key = std::pair<int32_t, int32_t>;  // of a segment and a slot or main

  int32_t num_grads() const { return static_cast<int32_t>(options_.grad_bytes.size()); }
  int64_t elements(int32_t i) const {
    return uec::elements_of(options_.grad_bytes[i], options_.grad_type[i]);
  }
  uint8_t* grad(int32_t rank, int32_t i, int32_t slot) {
    return memory_[rank]->data() + layouts_[0].gradients(configs_[0], bank_).offset[i] +
           slot * options_.grad_bytes[i];
  }
  uint8_t* main_grad(int32_t rank, int32_t i, int32_t m) {
    return addresses_[rank][i * layouts_[0].num_local_experts[rank] + m];
  }

  // Numbers of all sizes whose sums depend on their order, zeros of both signs, subnormal ones.
  void fill(uint8_t* to, int32_t i, GradType type, uint32_t seed) {
    std::minstd_rand random(seed * 977 + static_cast<uint32_t>(call_) * 31 + 1);
    for (int64_t at = 0; at < elements(i); ++at) {
      const auto draw = static_cast<uint32_t>(random() << 8 ^ random());
      uint32_t bits = (draw & 0x807FFFFF) | (110 + draw % 30) << 23;
      if (draw % 16 == 0) bits &= 0x80000000;
      if (draw % 16 == 1) bits &= 0x807FFFFF;
      put_number(to, at, type, std::bit_cast<float>(bits));
    }
  }

  void fill_rank(int32_t r) {
    for (int32_t i = 0; i < num_grads(); ++i) {
      for (int32_t s = 0; s < group_.slots_per_rank; ++s)
        fill(grad(r, i, s), i, options_.grad_type[i], 1000 * r + 10 * s + i);
      for (int32_t m = 0; m < layouts_[r].num_local_experts[r]; ++m)
        fill(main_grad(r, i, m), i, main_type_[i], 100000 + 1000 * r + 10 * m + i);
    }
    empty_[r].clear();
    for (int32_t i = 0; i < num_grads(); ++i)
      for (int32_t s = 0; s < group_.slots_per_rank; ++s)
        empty_[r][{i, s}].assign(grad(r, i, s), grad(r, i, s) + options_.grad_bytes[i]);
  }

  void expect(int32_t r) {
    expected_[r].clear();
    for (int32_t e = 0; e < group_.num_experts; ++e) {
      if (group_.home[e] != r) continue;
      const int32_t m = layouts_[0].local_idx[e];
      for (int32_t i = 0; i < num_grads(); ++i) {
        std::vector<uint8_t>& out = expected_[r][{i, m}];
        const uint8_t* const main = main_grad(r, i, m);
        out.assign(main, main + elements(i) * uec::bytes_of(main_type_[i]));
        std::vector<const uint8_t*> replicas;
        for (int32_t at = 0; at < static_cast<int32_t>(group_.slot_expert.size()); ++at)
          if (group_.slot_expert[at] == e)
            replicas.push_back(grad(at / group_.slots_per_rank, i, at % group_.slots_per_rank));
        if (replicas.empty()) continue;
        for (int64_t at = 0; at < elements(i); ++at) {
          float sum = number_at(replicas[0], at, options_.grad_type[i]);
          for (size_t k = 1; k < replicas.size(); ++k)
            sum += number_at(replicas[k], at, options_.grad_type[i]);
          put_number(out.data(), at, main_type_[i], number_at(main, at, main_type_[i]) + sum);
        }
      }
    }
  }

  void check_rank(int32_t r) override {
    if (!reduces) return EmulatedGroup::check_rank(r);
    for (const auto& [key, bytes] : expected_[r])
      if (std::memcmp(main_grad(r, key.first, key.second), bytes.data(), bytes.size()) != 0)
        wrong("main gradient", r, key);
    for (const auto& [key, bytes] : empty_[r]) {
      uint8_t* const at = grad(r, key.first, key.second);
      const bool filled = group_.slot_expert[r * group_.slots_per_rank + key.second] >= 0;
      if (filled && how_.zero &&
          std::any_of(at, at + bytes.size(), [](uint8_t b) { return b != 0; }))
        wrong("slot that is not zero", r, key);
      if (!filled && std::memcmp(at, bytes.data(), bytes.size()) != 0) wrong("empty slot", r, key);
      std::memset(at, 0x7F, bytes.size());  // they are this rank's own again
    }
  }
  [[noreturn]] void wrong(const char* what, int32_t r, const Key& key) const {
    std::fprintf(stderr, "%s:%d: call %llu: rank %d, segment %d, %d: %s\n", __FILE__, __LINE__,
                 static_cast<unsigned long long>(call_), r, key.first, key.second, what);
    std::_Exit(1);
  }

  void run(const uec::cuda::LaunchArgs& args, emulation::Grid grid) override {
    if (!reduces) return EmulatedGroup::run(args, grid);
    grid.warps = 1 + adding_warps;
    for (const RankState& state : states_)
      grid.shared_bytes =
          std::max(grid.shared_bytes, uec::cuda::reduce_shared_bytes(state.capacity));
    emulation::launch("ultraep_reduce", args, grid,
                      [&](std::byte* memory) { uec::cuda::reduce(args, memory); });
    // However the call went, its plan is no longer read.
    for (int32_t i = 0; i < grid.ranks; ++i)
      if (const uint64_t* const mark = args.on_device[i].in_use) CHECK_EQ(*mark, 0);
  }

  void prepare_sum(int32_t r, const Reducing& how, const std::vector<int32_t>& slot_expert) {
    device_[r] = {};
    if (plan_is_on_device(r)) {
      plans_[r] = slot_expert;
      uec::cuda::DeviceCall& call = device_[r];
      call.slot_expert = reinterpret_cast<uint64_t>(plans_[r].data());
      call.home = reinterpret_cast<uint64_t>(group_.home.data());
      call.main_ptrs = reinterpret_cast<uint64_t>(addresses_[r].data());
      call.mode = static_cast<int8_t>(how.mode);
      call.zero = how.zero;
      in_use_[r] = call_ + 1;
      call.in_use = reinterpret_cast<uint64_t>(&in_use_[r]);
      for (int32_t i = 0; i < num_grads(); ++i)
        call.segments |= static_cast<uint32_t>(main_type_[i]) << i;
      return;
    }
    uec::ReduceArgs args;
    args.slot_expert = slot_expert.data();
    args.main_type = main_type_.data();
    args.mode = how.mode;
    args.zero = how.zero;
    const auto prepare = [&](auto&&... out) {
      return uec::fill_call(uec::SingleThread{}, layouts_[r].tables(configs_[r]), args, out...);
    };
    make_block(r, prepare, nullptr, [&](const uint8_t** main_ptrs) {
      std::copy(addresses_[r].begin(), addresses_[r].end() - 1, main_ptrs);
    });
  }

  std::vector<GradType> main_type_;
  int64_t skew_;
  std::map<int32_t, uint64_t> in_use_;  // marks of plans
  Reducing how_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
  std::vector<std::vector<uint8_t*>> addresses_;                     // [ranks][segments][M]
  std::map<int32_t, std::map<Key, std::vector<uint8_t>>> expected_;  // of ranks, by main
  std::map<int32_t, std::map<Key, std::vector<uint8_t>>> empty_;     // of ranks, by slot
};

}  // namespace device_tests
