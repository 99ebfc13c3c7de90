// The way of one call through the C++ half, as docs/architecture.md lists it: a run enters each
// function of its tables, in their order and on the thread that they say.
#include <cxxabi.h>
#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "host/ranks.hpp"

namespace {

constexpr size_t kMaxEntered = 1 << 18;
struct Entered {
  void* function;
  bool by_caller;
};
std::vector<Entered> entered(kMaxEntered);
std::atomic<size_t> num_entered{kMaxEntered};  // nothing is noted yet
thread_local bool is_caller = false;

// A symbol without its namespaces `uec` and `uec::host`, template arguments and parameters.
std::string name_of(void* function) {
  Dl_info info;
  if (dladdr(function, &info) == 0 || info.dli_sname == nullptr) return "";
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> demangled(
      abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status), &std::free);
  if (status != 0) return "";
  std::string name;
  int depth = 0;
  for (const char* c = demangled.get(); *c != 0 && (*c != '(' || depth > 0); ++c) {
    depth += (*c == '<') - (*c == '>');
    if (depth == 0 && *c != '>') name += *c;
  }
  name = name.substr(name.rfind(' ') + 1);  // behind the type that a template returns
  for (const std::string space : {"uec::", "host::"})
    if (name.starts_with(space)) name = name.substr(space.size());
  return name;
}

struct Row {
  std::string function, file;
  int32_t table;
};

// The rows of the tables of functions, a row for each function.
std::vector<Row> read_rows(const std::string& document) {
  std::ifstream lines(document);
  std::vector<Row> rows;
  int32_t table = -1;
  for (std::string line; std::getline(lines, line);) {
    if (line == "| function | file |") ++table;
    if (table < 0 || !line.starts_with("| `")) continue;
    std::vector<std::string> names;
    for (size_t from = line.find('`'); from != std::string::npos; from = line.find('`', from)) {
      const size_t end = line.find('`', from + 1);
      names.push_back(line.substr(from + 1, end - from - 1));
      from = end + 1;
    }
    for (size_t i = 0; i + 1 < names.size(); ++i) rows.push_back({names[i], names.back(), table});
  }
  return rows;
}

// Both ranks get the other's expert; rank 0's call is made on this thread.
void run_call() {
  const PlanCase group = {.num_ranks = 2,
                          .num_experts = 2,
                          .slots_per_rank = 1,
                          .home = {0, 1},
                          .domain = {0, 0},
                          .slot_expert = {1, 0}};
  Ranks ranks(group, {});
  auto weights = ranks.make_weights();
  const std::vector<int32_t> segments{0};
  std::vector<uint64_t> epochs;
  for (int32_t r = 0; r < 2; ++r) {
    const std::vector<uint64_t> mains = ranks.addresses(r, weights[r].get());
    uec::Mode mode;
    is_caller = r == 0;
    num_entered = r == 0 ? 0 : num_entered.load();
    epochs.push_back(ranks.engine(r).replicate({.slot_expert = group.slot_expert.data(),
                                                .plan_digest = 0,
                                                .main_ptrs = mains.data(),
                                                .segments = segments.data(),
                                                .num_segments = 1,
                                                .mode = -1,
                                                .region = -1},
                                               true, &mode));
    is_caller = false;
  }
  for (int32_t r = 0; r < 2; ++r) wait_ok(ranks.engine(r), epochs[r]);
  CHECK(num_entered < kMaxEntered);
}

}  // namespace

extern "C" {
__attribute__((no_instrument_function)) void __cyg_profile_func_enter(void* function, void*) {
  if (num_entered.load(std::memory_order_relaxed) >= kMaxEntered) return;
  const size_t at = num_entered.fetch_add(1);
  if (at < kMaxEntered) entered[at] = {function, is_caller};
}
__attribute__((no_instrument_function)) void __cyg_profile_func_exit(void*, void*) {}
}

int main(int, char** arguments) {
  const std::string root = std::string(arguments[1]) + "/";
  const std::vector<Row> rows = read_rows(root + "docs/architecture.md");
  CHECK(rows.size() > 10 && rows.back().table == 1);
  run_call();
  const size_t count = num_entered;
  size_t before = 0;
  int32_t table = 0;
  for (const Row& row : rows) {
    std::ifstream file(root + row.file);
    std::stringstream text;
    text << file.rdbuf();
    const bool is_bound = row.file.starts_with("bindings/");
    const std::string last = row.function.substr(row.function.rfind(':') + 1);
    if (text.str().find(is_bound ? '"' + last + '"' : last + "(") == std::string::npos) {
      std::printf("%s is not in %s\n", row.function.c_str(), row.file.c_str());
      return 1;
    }
    if (is_bound) continue;  // not in this program
    if (row.table != table) before = 0;
    table = row.table;
    size_t at = 0;
    while (at < count &&
           (entered[at].by_caller != (table == 0) || name_of(entered[at].function) != row.function))
      ++at;
    if (at == count || at < before) {
      std::printf("the run did not enter %s where docs/architecture.md has it\n",
                  row.function.c_str());
      return 1;
    }
    before = at;
  }
}
