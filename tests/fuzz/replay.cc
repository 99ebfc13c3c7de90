// A fuzz target without a fuzzer: every file of a folder, and changes of them that a seed decides.
//
//   test_fuzz_plan CORPUS [CHANGES [SEED]]
//
// A failing check ends the program; what it was given is then in the file that is named.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

namespace fs = std::filesystem;
using Input = std::vector<uint8_t>;

// What is tried now, in memory until something ends the program.
std::string name;
Input input;
bool is_done = false;

void report() {
  if (is_done) return;
  const std::string file = "failed-" + fs::path(name).filename().string();
  std::ofstream(file, std::ios::binary)
      .write(reinterpret_cast<const char*>(input.data()),
             static_cast<std::streamsize>(input.size()));
  std::fprintf(stderr, "from %s; what was tried is in %s\n", name.c_str(), file.c_str());
}

void try_input() { LLVMFuzzerTestOneInput(input.data(), input.size()); }

// Some bytes replaced, removed or put in, or the end of another input.
void change(const std::vector<Input>& corpus, std::mt19937& random) {
  const auto below = [&](size_t count) { return random() % std::max<size_t>(count, 1); };
  for (size_t times = 1 + below(4); times > 0; --times) {
    const size_t at = below(input.size());
    const auto where = input.begin() + static_cast<std::ptrdiff_t>(at);
    switch (random() % 4) {
      case 0:
        if (!input.empty()) *where = static_cast<uint8_t>(random());
        break;
      case 1:
        if (!input.empty()) input.erase(where);
        break;
      case 2:
        input.insert(where, static_cast<uint8_t>(random()));
        break;
      default: {
        const Input& other = corpus[below(corpus.size())];
        input.resize(at);
        if (at < other.size())
          input.insert(input.end(), other.begin() + static_cast<std::ptrdiff_t>(at), other.end());
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2 || argc > 4) {
    std::fprintf(stderr, "expected CORPUS [CHANGES [SEED]]\n");
    return 2;
  }
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(argv[1])) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  if (files.empty()) {
    std::fprintf(stderr, "%s is empty; expected a corpus\n", argv[1]);
    return 2;
  }
  std::atexit(report);
  std::vector<Input> corpus;
  for (const fs::path& file : files) {
    std::ifstream stream(file, std::ios::binary);
    input.assign(std::istreambuf_iterator<char>(stream), {});
    corpus.push_back(input);
    name = file.string();
    try_input();
  }
  const long changes = argc > 2 ? std::atol(argv[2]) : 0;
  std::mt19937 random(argc > 3 ? static_cast<uint32_t>(std::atol(argv[3])) : 1);
  for (long i = 0; i < changes; ++i) {
    const size_t from = random() % corpus.size();
    input = corpus[from];
    name = files[from].string();
    change(corpus, random);
    try_input();
  }
  std::printf("%zu inputs of the corpus, %ld changed\n", corpus.size(), changes);
  is_done = true;
  return 0;
}
