// How much room calls have for listed columns, and when the host looks or waits.
#include "core/norm/room.h"

#include <gtest/gtest.h>

namespace fused_norm {
namespace {

int memory[4];
ParamsSeen seen(uint32_t version, int at = 0) { return {{&memory[at], nullptr}, version}; }

enum Choice { kKeep, kFromReport, kLook };

// A training loop as the host sees it. Each step is one forward and one backward pass, whose report
// is read `late` backward passes later.
struct Loop {
  uint32_t version = 7;
  int at = 0, late = 0;
  bool moving = true;
  ParamsHistory history{seen(7)};
  std::vector<Report> reports = std::vector<Report>(1);

  const Report& newest() const {
    return reports[reports.size() > late ? reports.size() - 1 - late : 0];
  }
  void report() { reports.push_back({0, history.look(), moving, true}); }

  Choice forward(bool in_backward = false) {
    if (!history.chooses(seen(version, at), newest(), in_backward)) return kKeep;
    if (history.covers(newest(), false)) return kFromReport;
    report();
    for (int i = 0; i < late; ++i) reports.push_back(reports.back());
    EXPECT_TRUE(history.covers(newest(), false));
    return kLook;
  }
  void backward() {
    history.backward(seen(version, at));
    report();
  }
  // Whether the step waits for a report.
  bool optimizer_step(int moves = 1, bool captured = false) {
    history.see(seen(version, at), false);
    const bool waits = !history.covers(newest(), captured);
    if (waits) history.waited();
    version += moves;
    history.after_step(seen(version, at));
    return waits;
  }
  Choice step(int moves = 1) {
    const Choice choice = forward();
    backward();
    optimizer_step(moves);
    return choice;
  }
};

int64_t eager_room(int64_t at_risk, int64_t cols) { return room_for(at_risk, cols, 2, false); }
int64_t fixed_room(int64_t at_risk, int64_t cols) { return room_for(at_risk, cols, 2, true); }

TEST(Room, ReportsSurviveTheirWord) {
  const Report found = unpack_report(pack_report(1 << 30, 0xfedc, true));
  EXPECT_TRUE(found.valid && found.moving);
  EXPECT_EQ(found.stamp, 0xfedc);
  EXPECT_EQ(found.at_risk, 1 << 30);
  EXPECT_FALSE(unpack_report(pack_report(0, 0, false)).moving);
  EXPECT_TRUE(unpack_report(pack_report(0, 0, false)).valid);
  EXPECT_FALSE(unpack_report(0).valid);
}

TEST(Room, AnEagerCallHasRoomForWhatItKnows) {
  EXPECT_EQ(eager_room(0, 4096), 0);
  // The list takes at most half of what the flag saves: of 16 bit a quarter of the columns in fp32.
  for (int64_t columns = 1; columns <= 1024; ++columns) {
    const int64_t room = eager_room(columns, 4096);
    EXPECT_GT(room, columns);
    EXPECT_FALSE(is_near(columns, room, 4096));
    EXPECT_EQ(room % 4, 0);
    EXPECT_LE(room, columns + columns / 3 + 7);
  }
  EXPECT_EQ(eager_room(8, 4096), 16);
  EXPECT_EQ(eager_room(1025, 4096), kSaveInput);
  for (int x_bytes : {4, 8}) {
    EXPECT_GT(room_for(2048, 4096, x_bytes, false), 2048);
    EXPECT_EQ(room_for(2049, 4096, x_bytes, false), kSaveInput);
  }
  for (int64_t columns = kMostRoom - 9; columns < kMostRoom + 9; ++columns)
    EXPECT_LE(room_for(columns, int64_t{1} << 30, 4, false), kMostRoom);
}

TEST(Room, ACallThatCannotChooseHasRoomToSpare) {
  for (int64_t cols : {1, 15, 16, 17, 264, 4096, 5000, 50257, 1 << 20}) {
    const int64_t least = fixed_room(0, cols);
    EXPECT_GE(least, std::min<int64_t>(cols, 16));
    EXPECT_GE(least, std::min(cols, cols / 256));
    EXPECT_LE(least, cols);
    for (int64_t at_risk = 0; at_risk <= cols; at_risk += 1 + at_risk / 7) {
      const int64_t room = fixed_room(at_risk, cols);
      EXPECT_TRUE(room == kSaveInput || !is_near(at_risk, room, cols)) << cols << " " << at_risk;
      EXPECT_TRUE(room == kSaveInput || room >= least);
    }
    EXPECT_EQ(fixed_room(cols, cols), kSaveInput);  // and where nothing is known
  }
  EXPECT_EQ(fixed_room(8, 4096), 32);
}

TEST(Room, CompilingAnewEnds) {
  // Whatever becomes of the columns, room that was too small is so only a few times.
  for (int64_t cols : {32, 264, 4096, 65536}) {
    int64_t at_risk = 0, room = 0;
    int compiled = 0;
    for (; (room = fixed_room(at_risk, cols)) != kSaveInput; ++compiled) {
      while (at_risk < cols && !is_near(at_risk, room, cols)) ++at_risk;
      if (at_risk == cols) break;
    }
    EXPECT_LE(compiled, kLastGeneration);
  }
}

TEST(Room, OrdinaryTrainingLooksTwice) {
  for (bool moving : {false, true}) {  // bf16 weights of 1 need not
    for (int moves : {0, 1, 2}) {      // fused optimizers move no counter
      Loop loop;
      loop.moving = moving;
      EXPECT_EQ(loop.step(moves), kLook);
      EXPECT_EQ(loop.step(moves), kLook);  // how fast the parameters move was not known
      for (int step = 0; step < 20; ++step) EXPECT_EQ(loop.step(moves), kFromReport);
    }
  }
}

TEST(Room, ReportsMayBeLateButNotTooLate) {
  Loop loop;
  for (int step = 0; step < 20; ++step) loop.step();
  loop.late = kUpdatesAhead - 1;
  for (int step = 0; step < 40; ++step) EXPECT_EQ(loop.step(), kFromReport);
  loop.late = kUpdatesAhead;
  EXPECT_EQ(loop.step(), kLook);
}

TEST(Room, EvaluationAndAccumulationChangeNothing) {
  Loop loop;
  for (int step = 0; step < 3; ++step) loop.step();
  EXPECT_EQ(loop.forward(), kFromReport);
  EXPECT_EQ(loop.forward(), kKeep);
  loop.backward();
  loop.backward();
  EXPECT_EQ(loop.forward(), kKeep);
}

TEST(Room, AChangeByHandIsLookedAt) {
  Loop loop;
  for (int step = 0; step < 5; ++step) loop.step();
  for (int moves : {1, 1, 3}) {  // the same one too
    loop.version += moves;
    EXPECT_EQ(loop.step(), kLook);
    EXPECT_EQ(loop.step(), kFromReport);
  }
  loop.at = 1;
  EXPECT_EQ(loop.step(), kLook);
  EXPECT_EQ(loop.step(), kFromReport);
}

TEST(Room, AChangeByHandBetweenBackwardAndStepIsLookedAt) {
  Loop loop;
  for (int step = 0; step < 5; ++step) loop.step();
  loop.forward();
  loop.backward();
  ++loop.version;
  EXPECT_TRUE(loop.optimizer_step());
  EXPECT_EQ(loop.forward(), kLook);
}

TEST(Room, StepsOfOtherOptimizersAreOne) {
  Loop loop;
  for (int step = 0; step < 40; ++step) {
    EXPECT_EQ(loop.forward(), step < 2 ? kLook : kFromReport);
    loop.backward();
    for (int optimizer = 0; optimizer < 100; ++optimizer) loop.optimizer_step(optimizer == 7);
  }
}

TEST(Room, ANormThatRestsMayBeMovedAllTheSame) {
  Loop loop;
  for (int step = 0; step < 5; ++step) loop.step();
  for (int step = 0; step < kUpdatesAhead; ++step) loop.optimizer_step();  // by momentum
  EXPECT_EQ(loop.forward(), kLook);
  for (int step = 0; step < 40; ++step) loop.optimizer_step(0);  // of others
  EXPECT_EQ(loop.forward(), kFromReport);
}

TEST(Room, GradientsThatBecameNaNAreAReasonToLook) {
  Loop loop;
  for (int step = 0; step < 5; ++step) loop.step();
  loop.history.doubt();
  EXPECT_EQ(loop.forward(), kLook);
}

TEST(Room, TrainingByHandBecomesAHabit) {
  Loop loop;
  for (int step = 0; step < 8; ++step) {
    EXPECT_EQ(loop.forward(), step < 3 ? kLook : kFromReport) << step;
    loop.backward();
    ++loop.version;
  }
  ++loop.version;  // zeroed, too
  EXPECT_EQ(loop.forward(), kLook);
}

TEST(Room, OtherMemoryBecomesAHabit) {
  Loop loop;
  int looks = 0;
  for (int step = 0; step < 10; ++step) {
    loop.at = step % 3;
    looks += loop.step() == kLook;
  }
  EXPECT_LE(looks, 6);
  EXPECT_EQ(loop.step(), kFromReport);
}

TEST(Room, ACheckpointSavesTheSameTwice) {
  Loop loop;
  for (int step = 0; step < 8; ++step) {
    loop.at = step % 2;  // gathered anew
    loop.step();
  }
  loop.forward();
  loop.at = 2;
  EXPECT_EQ(loop.forward(/*in_backward=*/true), kKeep);
  loop.backward();
  EXPECT_EQ(loop.forward(/*in_backward=*/true), kKeep);
  EXPECT_FALSE(loop.optimizer_step());
  EXPECT_EQ(loop.forward(/*in_backward=*/true), kFromReport);  // the first had no gradients
}

TEST(Room, WeightsThatMayMoveUnseenAreLookedAtForAWhile) {
  for (bool moving : {false, true}) {
    Loop loop;
    loop.moving = moving;
    int looks = 0, kept = 0;
    for (int step = 0; step < 20; ++step) {
      const Choice choice = loop.forward();
      looks += choice == kLook;
      kept += choice == kKeep;
      loop.backward();
    }
    EXPECT_EQ(looks, moving ? 6 : 2);
    EXPECT_EQ(kept, moving ? 0 : 18);
  }
}

TEST(Room, AStepWaitsOnlyForWhatIsNotKnown) {
  // Of compiled code, which has looked when it was traced.
  Loop loop;
  loop.report();
  for (int step = 0; step < 20; ++step) {
    loop.late = 1;  // the step's own
    loop.backward();
    EXPECT_EQ(loop.optimizer_step(), step == 1) << step;
  }
  ++loop.version;
  loop.backward();
  EXPECT_TRUE(loop.optimizer_step());
  // A new norm, of which nobody knows anything.
  EXPECT_FALSE(ParamsHistory(seen(0)).covers(unpack_report(0), false));
}

TEST(Room, ReplayedGraphsReportWithOneStamp) {
  Loop loop;
  for (int step = 0; step < 3; ++step) loop.step();
  EXPECT_TRUE(loop.optimizer_step(1, /*captured=*/true));
  for (int step = 0; step < 40; ++step) EXPECT_FALSE(loop.optimizer_step(1, true));
  ++loop.version;
  EXPECT_TRUE(loop.optimizer_step(1, true));
  EXPECT_FALSE(loop.optimizer_step(1, true));
}

}  // namespace
}  // namespace fused_norm
