// The CPU kernels alone, without torch, for processors that are there in an emulator only:
//
//   kernels default write FILE     runs all cases, and writes the results to a file
//   kernels default same FILE      compares the results with the file, to the last bit
//   kernels neon close FILE        compares them within rounding
//
// Results are compared with fp64 as well. The first argument names the capability that is expected to be in use.
#include "cases.h"
#include "cpu_dispatch.h"

int main(int argc, char** argv) {
  const char* capability = pagedattn::cpu_capability_name(pagedattn::cpu_capability());
  if (argc != 4) return std::puts("expected a capability; write, same or close; and a file"), 2;
  const std::string expected = argv[1], asked = argv[2];
  if (capability != expected) return std::printf("expected %s, got %s\n", argv[1], capability), 1;
  using Mode = cases::Judge::Mode;
  cases::Judge judge(argv[3], asked == "write" ? Mode::WRITE : asked == "same" ? Mode::SAME : Mode::CLOSE);
  if (!judge.is_open()) return std::perror(argv[3]), 2;
  cases::other_cases(judge);
  cases::linear_cases(judge);
  cases::attention_cases(judge);
  std::printf("%s, %s: %d comparisons, %d failed\n", capability, argv[2], judge.num_comparisons(),
              judge.num_failures());
  return judge.num_failures() != 0;
}
