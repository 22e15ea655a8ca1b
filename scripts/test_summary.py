#!/usr/bin/env python3
"""Reads the JUnit file of a test run and prints how many tests passed, failed and were skipped, and why.

A test that needs something this machine lacks prints a line that starts with `SKIP:` and returns. Such a line is a
skip, not a pass. When the run was root's, a skip whose reason is a missing root is a failure: the machine could
have run it. A run in which no test passed has failed.

Usage: test_summary.py JUNIT_FILE (root|user)
       test_summary.py --self-test
"""

import re
import sys
import unittest
import xml.etree.ElementTree as ElementTree

SKIP = re.compile(r"^\s*SKIP:\s*(.*\S)\s*$", re.MULTILINE)
NEEDS_ROOT = re.compile(r"\broot\b", re.IGNORECASE)


def summarise(junit: str, is_root: bool) -> tuple[list[str], bool]:
    """Returns the lines to print, and whether the run is good."""
    passed, failed, skipped = 0, [], []
    for suite in ElementTree.fromstring(junit).iter("testsuite"):
        for case in suite.iter("testcase"):
            name = f"{suite.get('name')} {case.get('name')}"
            output = "\n".join(part.text or "" for part in case if part.tag in ("system-out", "system-err"))
            reasons = SKIP.findall(output)
            if case.find("failure") is not None or case.find("error") is not None:
                failed.append(name)
            elif reasons:
                skipped.append((name, reasons))
            else:
                passed += 1
    lines = [f"skipped: {name}: {reason}" for name, reasons in skipped for reason in reasons]
    refused = [
        f"FAILED: {name} was skipped for want of root, and this is root: {reason}"
        for name, reasons in skipped
        for reason in reasons
        if is_root and NEEDS_ROOT.search(reason)
    ]
    lines += refused + [f"FAILED: {name}" for name in failed]
    if passed == 0:
        lines.append("FAILED: no test passed at all")
    lines.append(f"tests: {passed} passed, {len(failed)} failed, {len(skipped)} skipped")
    return lines, not failed and not refused and passed > 0


class SummaryTest(unittest.TestCase):
    """What counts as what."""

    PASS = '<testcase name="p"><system-out>prints SKIP: inside a line</system-out></testcase>'
    SKIP_ROOT = '<testcase name="r"><system-out>\nSKIP: needs root\n</system-out></testcase>'
    SKIP_OTHER = '<testcase name="o"><system-err>SKIP: no btrfs here</system-err></testcase>'
    FAIL = '<testcase name="f"><failure/><system-out>SKIP: and then failed</system-out></testcase>'

    def check(self, cases: str, is_root: bool) -> tuple[str, bool]:
        lines, good = summarise(f'<testsuites><testsuite name="s">{cases}</testsuite></testsuites>', is_root)
        return lines[-1], good

    def test_skips_are_neither_passed_nor_failed(self) -> None:
        cases = self.PASS + self.SKIP_OTHER
        self.assertEqual(self.check(cases, True), ("tests: 1 passed, 0 failed, 1 skipped", True))

    def test_root_may_not_skip_for_want_of_root(self) -> None:
        cases = self.PASS + self.SKIP_ROOT
        self.assertEqual(self.check(cases, False), ("tests: 1 passed, 0 failed, 1 skipped", True))
        self.assertEqual(self.check(cases, True), ("tests: 1 passed, 0 failed, 1 skipped", False))

    def test_a_failure_is_one_whatever_it_prints(self) -> None:
        self.assertEqual(self.check(self.PASS + self.FAIL, True), ("tests: 1 passed, 1 failed, 0 skipped", False))

    def test_a_run_without_a_passed_test_has_failed(self) -> None:
        self.assertEqual(self.check(self.SKIP_OTHER, True), ("tests: 0 passed, 0 failed, 1 skipped", False))


def main() -> int:
    if sys.argv[1:] == ["--self-test"]:
        result = unittest.TextTestRunner(verbosity=0).run(unittest.defaultTestLoader.loadTestsFromTestCase(SummaryTest))
        return 0 if result.wasSuccessful() else 1
    path, who = sys.argv[1:]
    with open(path, encoding="utf-8") as file:
        lines, good = summarise(file.read(), who == "root")
    print("\n".join(lines))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
