#include "simulation/explore.hpp"

namespace sim {
namespace {

class Dice {
 public:
  explicit Dice(uint64_t seed) : state_(uec::mix(0x5EED, seed) | 1) {}
  uint32_t roll(uint32_t sides) {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return static_cast<uint32_t>((state_ * 0x9E3779B97F4A7C15u) >> 33) % sides;
  }

 private:
  uint64_t state_;
};

// Weights of everything that can move. 0: only when nothing else can.
class Temper {
 public:
  explicit Temper(Dice& dice) {
    const bool even = dice.roll(8) == 0;
    for (uint32_t& weight : weights_) {
      static constexpr uint32_t kChoices[] = {0, 1, 4, 4, 64, 1024};
      weight = even ? 4 : kChoices[dice.roll(6)];
    }
    stop_ = dice.roll(3) == 0 ? 64 : 1;
    salt_ = dice.roll(1 << 16);
  }

  uint32_t weight(const World& world, const Transition& t) const {
    switch (t.kind) {
      case Transition::kFetch:
        return of(0, t.index);
      case Transition::kStore:
        return of(1, t.index);
      case Transition::kProgram:
        return of(2, t.index);
      case Transition::kOperation: {
        const World::Operation& op = world.operation(t.index);
        // Destinations of one store are fast and slow apart.
        return of(2 + op.state, op.state == World::Operation::kRead ? op.cell : op.agent);
      }
      case Transition::kShow:
        return of(6, t.index);
      case Transition::kStop:
        return stop_;
      default:  // the clock, and what others find out without being told
        return of(7, t.kind);
    }
  }

 private:
  uint32_t of(uint32_t kind, int32_t index) const {
    return weights_[uec::mix(salt_ + kind, index) % 61];
  }

  uint32_t weights_[61], stop_, salt_;
};

Outcome finish(Simulation& simulation, Outcome outcome) {
  outcome.property = simulation.violation();
  if (outcome.property != Property::kNone) outcome.detail = simulation.world().detail;
  return outcome;
}

}  // namespace

Outcome explore_random(Simulation& simulation, uint64_t seed, uint64_t schedules) {
  constexpr uint64_t kMaxSteps = 1'000'000;
  const std::vector<uint8_t> start = simulation.save();
  std::vector<Transition> possible;
  std::vector<uint32_t> weights;
  Outcome outcome;
  for (uint64_t i = 0; i < schedules; ++i) {
    Dice dice(seed + i);
    const Temper temper(dice);
    simulation.restore(start);
    *simulation.world().random = 1 + dice.roll(1 << 30);
    ++outcome.schedules;
    for (uint64_t step = 0;; ++step) {
      simulation.list(possible);
      if (possible.empty()) {
        simulation.check_end();
        break;
      }
      if (step == kMaxSteps)
        simulation.world().violate(Property::kStuck, "no end after %llu steps",
                                   static_cast<unsigned long long>(step));
      uint64_t sum = 0;
      weights.clear();
      for (const Transition& t : possible) {
        weights.push_back(temper.weight(simulation.world(), t));
        sum += weights.back();
      }
      size_t pick = 0;
      if (sum == 0) {
        pick = dice.roll(static_cast<uint32_t>(possible.size()));
      } else {
        int64_t at = dice.roll(static_cast<uint32_t>(sum));
        while ((at -= weights[pick]) >= 0) ++pick;
      }
      simulation.take(possible[pick]);
      ++outcome.steps;
      if (simulation.violation() != Property::kNone) return finish(simulation, outcome);
      outcome.max_lead = std::max(outcome.max_lead, simulation.lead());
    }
    if (simulation.violation() != Property::kNone) return finish(simulation, outcome);
  }
  simulation.restore(start);
  return outcome;
}

namespace {

// States that have been seen.
class Seen {
 public:
  bool insert(uint64_t hash) {
    if (2 * ++count_ > hashes_.size()) {
      std::vector<uint64_t> larger(2 * hashes_.size());
      hashes_.swap(larger);
      for (const uint64_t old : larger)
        if (old != 0) place(old);
    }
    const bool is_new = place(hash + (hash == 0));
    count_ -= is_new ? 0 : 1;
    return is_new;
  }

 private:
  bool place(uint64_t hash) {
    size_t at = hash & (hashes_.size() - 1);
    for (; hashes_[at] != 0; at = (at + 1) & (hashes_.size() - 1))
      if (hashes_[at] == hash) return false;
    hashes_[at] = hash;
    return true;
  }

  std::vector<uint64_t> hashes_ = std::vector<uint64_t>(1024);
  size_t count_ = 0;
};

// Takes every rank into its call: nothing but its own thread's steps and the flags' arrivals.
void open_all(Simulation& simulation) {
  std::vector<Transition> possible;
  for (;;) {
    simulation.list(possible);
    const auto next = std::find_if(possible.begin(), possible.end(), [](const Transition& t) {
      return t.kind == Transition::kProgram || t.kind == Transition::kShow;
    });
    if (next == possible.end()) return;
    simulation.take(*next);
  }
}

struct Node {
  std::vector<uint8_t> state;
  std::vector<Transition> possible;
  size_t next = 0;
};

}  // namespace

Outcome explore_all(Simulation& simulation, uint64_t max_states) {
  const std::vector<uint8_t> start = simulation.save();
  *simulation.world().random = 0;
  if (simulation.simulated().opened) open_all(simulation);
  Seen seen;
  std::vector<Node> path;
  Outcome outcome;
  const auto enter = [&] {
    outcome.max_lead = std::max(outcome.max_lead, simulation.lead());
    if (!seen.insert(simulation.world().hash())) return;
    ++outcome.states;
    Node node;
    simulation.list(node.possible);
    simulation.reduce(node.possible);
    if (node.possible.empty()) {
      simulation.check_end();
      return;
    }
    if (node.possible.size() > 1) node.state = simulation.save();
    path.push_back(std::move(node));
  };
  enter();
  while (!path.empty() && simulation.violation() == Property::kNone) {
    Node& node = path.back();
    if (node.next == node.possible.size() || outcome.states >= max_states) {
      outcome.complete &= node.next == node.possible.size();
      path.pop_back();
      continue;
    }
    if (node.next > 0) simulation.restore(node.state);
    ++outcome.steps;
    simulation.take(node.possible[node.next++]);
    if (simulation.violation() == Property::kNone) enter();
  }
  outcome = finish(simulation, outcome);
  simulation.restore(start);
  return outcome;
}

}  // namespace sim
