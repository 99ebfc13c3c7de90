// The protocol under a hostile memory: named and random cases in random schedules, and the smallest
// ones in every schedule.
//
//   test_hostile                         what ctest runs
//   test_hostile --soak SECONDS [SEED]   random cases for that long
//   test_hostile --mutant NAME           the sources are broken on purpose: prints whether that is
//                                        caught, and how soon; exit code 1: it is not
//   test_hostile --all CASE              every schedule of one named case
#include <chrono>
#include <csignal>
#include <cstring>

#include "simulation/cases.hpp"
#include "simulation/explore.hpp"

namespace {

using sim::Case;
using sim::Outcome;
using sim::Property;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

[[noreturn]] void fail(const Case& c, const Outcome& outcome) {
  std::fprintf(stderr, "%s: %s: %s (schedule %llu, ending %d, culprit %d at call %d)\n",
               c.name.c_str(), name_of(outcome.property), outcome.detail.c_str(),
               static_cast<unsigned long long>(outcome.schedules), static_cast<int>(c.ending),
               c.culprit, c.at_call);
  std::exit(1);
}

struct Totals {
  uint64_t cases = 0, schedules = 0, steps = 0;
  int32_t max_lead = 0;
  uint32_t timed_out = 0;
  void add(const Outcome& o) {
    ++cases;
    schedules += o.schedules;
    steps += o.steps;
    max_lead = std::max(max_lead, o.max_lead);
  }
};

void run_random(const Case& c, uint64_t seed, uint64_t schedules, Totals& totals) {
  sim::Simulation simulation(c);
  const Outcome outcome = explore_random(simulation, seed, schedules);
  totals.add(outcome);
  totals.timed_out |= simulation.timed_out();
  if (outcome.property != Property::kNone) fail(c, outcome);
}

void run_all(const Case& c) {
  const auto start = Clock::now();
  sim::Simulation simulation(c);
  const Outcome outcome = explore_all(simulation, kSanitized ? 20'000 : 4'000'000);
  std::printf("every schedule of \"%s\": %llu states, %llu steps, %.1f s%s\n", c.name.c_str(),
              static_cast<unsigned long long>(outcome.states),
              static_cast<unsigned long long>(outcome.steps), seconds_since(start),
              outcome.complete ? "" : " (not all: limited)");
  if (outcome.property != Property::kNone) fail(c, outcome);
}

void print(const char* what, const Totals& t, double seconds) {
  std::printf("%s: %llu cases, %llu schedules, %llu steps, ranks up to %d calls apart, %.1f s\n",
              what, static_cast<unsigned long long>(t.cases),
              static_cast<unsigned long long>(t.schedules),
              static_cast<unsigned long long>(t.steps), t.max_lead, seconds);
}

void soak(double seconds, uint64_t seed) {
  const auto start = Clock::now();
  Random random(static_cast<uint32_t>(seed));
  Totals totals;
  while (seconds_since(start) < seconds)
    run_random(sim::draw_case(random), seed += 1000, 50, totals);
  print("random cases", totals, seconds_since(start));
}

// What catch_mutant() is at: a mutant may also read an address that nothing is at.
const char* mutant = nullptr;
const Case* tried = nullptr;
uint64_t tried_schedules = 0;

[[noreturn]] void on_fault(int) {
  std::printf("mutant %s: caught: a stray access; %llu schedules; \"%s\": SIGSEGV\n", mutant,
              static_cast<unsigned long long>(tried_schedules), tried->name.c_str());
  std::fflush(stdout);
  std::_Exit(0);
}

// The counter-examples, then rounds over all named cases and as many random ones, until something
// is found. Cases share the effort evenly, so that small ones see many schedules.
int catch_mutant(const char* name) {
  mutant = name;
  if (std::strcmp(name, "none") != 0) std::signal(SIGSEGV, on_fault);
  constexpr uint64_t kRounds = 30, kSteps = 10'000;  // the slowest mutant takes 22
  Random random(1);
  const std::vector<Case> named = sim::named_cases();
  uint64_t& schedules = tried_schedules;
  for (uint64_t round = 0; round <= kRounds; ++round)
    for (size_t i = 0; i < 2 * named.size(); ++i) {
      const bool is_example = i % 2 == 0 && named[i / 2].name.starts_with("counter-example");
      if (round == 0 && !is_example) continue;
      const Case c = i % 2 == 0 ? named[i / 2] : sim::draw_case(random);
      tried = &c;
      sim::Simulation simulation(c);
      for (uint64_t steps = 0, seed = (round * 1000 + i) * 1000; steps < kSteps; seed += 10) {
        const Outcome outcome = explore_random(simulation, seed, 10);
        schedules += outcome.schedules;
        steps += outcome.steps;
        if (outcome.property == Property::kNone) continue;
        std::printf("mutant %s: caught: %s; %llu schedules; \"%s\": %s\n", name,
                    name_of(outcome.property), static_cast<unsigned long long>(schedules),
                    c.name.c_str(), outcome.detail.c_str());
        return 0;
      }
    }
  std::printf("mutant %s: survived %llu schedules\n", name,
              static_cast<unsigned long long>(schedules));
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 2 && std::strcmp(argv[1], "--mutant") == 0) return catch_mutant(argv[2]);
  if (argc > 2 && std::strcmp(argv[1], "--soak") == 0) {
    soak(std::atof(argv[2]), argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 1);
    return 0;
  }
  const bool is_few = kPart > 1 && !kSanitized;  // "two hubs" has the most states
  const bool one = argc > 2 && std::strcmp(argv[1], "--all") == 0;
  for (const Case& c : sim::exhaustive_cases())
    if (one ? c.name == argv[2] : !is_few || c.name != "two hubs") run_all(c);
  if (one) return 0;
  const auto start = Clock::now();
  Totals named, random_cases;
  uint64_t seed = 0;
  for (const Case& c : sim::named_cases()) run_random(c, ++seed, scaled(400), named);
  print("named cases", named, seconds_since(start));
  Random random(3);
  for (int i = 0; i < scaled(1500); ++i)
    run_random(sim::draw_case(random), seed += 1000, 20, random_cases);
  print("random cases", random_cases, seconds_since(start));
  CHECK(named.max_lead >= 2);
  // Every kind of wait has expired, and was reported.
  constexpr uint32_t kAllFlags = (2u << static_cast<int>(uec::FlagKind::kConsumed)) - 1;
  if (kPart == 1) CHECK_EQ(named.timed_out | random_cases.timed_out, kAllFlags);
}
