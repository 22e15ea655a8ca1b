//! Configuration from the environment, with every problem reported together.
//!
//! A variable is an [`EnvVar`] constant: name, documentation, default, unit, and the version it came with. The
//! reference page is generated from those constants, so that what is documented is what is read. A
//! [`ConfigReader`] collects problems instead of returning at the first; [`ConfigReader::finish`] gives the
//! configuration only when there are none.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// A variable of the environment, declared once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EnvVar {
    /// `CLOISTER_…`, or a standard name.
    pub name: &'static str,
    /// What it changes, in one or two sentences.
    pub doc: &'static str,
    /// The text that stands for an unset variable; `None` when unset has a meaning of its own.
    pub default: Option<&'static str>,
    /// `seconds`, `bytes`, …
    pub unit: Option<&'static str>,
    /// First version that has it.
    pub since: &'static str,
}

/// The variables that a configuration is read from.
#[derive(Debug, Clone, Default)]
pub struct Environment {
    values: BTreeMap<String, String>,
}

impl Environment {
    /// Returns this process's environment. Variables that are not UTF-8 are left out.
    pub fn of_process() -> Self {
        let values = std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
            .collect();
        Self { values }
    }

    /// Returns an environment with exactly these variables.
    pub fn of<N: Into<String>, V: Into<String>>(pairs: impl IntoIterator<Item = (N, V)>) -> Self {
        Self { values: pairs.into_iter().map(|(name, value)| (name.into(), value.into())).collect() }
    }

    /// Returns this environment with one variable set, as a flag on the command line does.
    pub fn with(mut self, variable: &EnvVar, value: impl Into<String>) -> Self {
        self.values.insert(variable.name.to_owned(), value.into());
        self
    }

    /// Returns the text of a variable; an empty one counts as unset.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.values.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }
}

/// Every problem of a configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError {
    /// One line each, naming the variable, its value and what is accepted.
    pub problems: Vec<String>,
}

impl std::error::Error for ConfigError {}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.problems.as_slice() {
            [only] => f.write_str(only),
            all => {
                write!(f, "{} problems in the configuration", all.len())?;
                for problem in all {
                    write!(f, "\n  - {problem}")?;
                }
                Ok(())
            }
        }
    }
}

/// Reads variables and keeps what is wrong with them.
#[derive(Debug)]
pub struct ConfigReader<'a> {
    environment: &'a Environment,
    problems: Vec<String>,
}

impl<'a> ConfigReader<'a> {
    /// Returns a reader of `environment` without problems.
    pub fn new(environment: &'a Environment) -> Self {
        Self { environment, problems: Vec::new() }
    }

    /// Returns the text of a variable or its default.
    pub fn text(&self, variable: &EnvVar) -> Option<&'a str> {
        self.environment.get(variable.name).or(variable.default)
    }

    /// Returns the text of a variable; unset without a default is a problem.
    pub fn required(&mut self, variable: &EnvVar) -> String {
        match self.text(variable) {
            Some(text) => text.to_owned(),
            None => {
                self.problems.push(format!("`{}` is not set: {}", variable.name, variable.doc));
                String::new()
            }
        }
    }

    /// Returns the value of a variable or of its default, `None` when there is neither or it does not parse.
    pub fn parse<T>(&mut self, variable: &EnvVar) -> Option<T>
    where
        T: FromStr,
        T::Err: fmt::Display,
    {
        let text = self.text(variable)?;
        match text.parse() {
            Ok(value) => Some(value),
            Err(error) => {
                let shown: String = text.chars().take(64).collect();
                self.problems.push(format!("`{}` is `{shown}`: {error}", variable.name));
                None
            }
        }
    }

    /// Returns a number of seconds within `range` as a duration.
    pub fn seconds(&mut self, variable: &EnvVar, range: std::ops::RangeInclusive<u64>) -> Duration {
        let least = *range.start();
        match self.parse::<u64>(variable) {
            Some(seconds) if range.contains(&seconds) => Duration::from_secs(seconds),
            Some(seconds) => {
                self.problems.push(format!(
                    "`{}` is `{seconds}`: accepted is {least} to {} seconds",
                    variable.name,
                    range.end()
                ));
                Duration::from_secs(least)
            }
            None => Duration::from_secs(least),
        }
    }

    /// Keeps a problem that the caller found.
    pub fn problem(&mut self, text: impl Into<String>) {
        self.problems.push(text.into());
    }

    /// Keeps a problem for each set variable that starts with `prefix` and is none of `declared`.
    pub fn refuse_unknown(&mut self, prefix: &str, declared: &[&EnvVar]) {
        for name in self.environment.values.keys().filter(|name| name.starts_with(prefix)) {
            if declared.iter().any(|variable| variable.name == name) {
                continue;
            }
            let near = nearest(name, declared.iter().map(|variable| variable.name));
            let hint = near.map(|near| format!("; did you mean `{near}`?")).unwrap_or_default();
            self.problems.push(format!("`{name}` is not a variable of this role{hint}"));
        }
    }

    /// Returns `value` when there was no problem.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] with every problem; the role must not start.
    pub fn finish<T>(self, value: T) -> Result<T, ConfigError> {
        if self.problems.is_empty() { Ok(value) } else { Err(ConfigError { problems: self.problems }) }
    }
}

/// Returns the candidate with the fewest edits to `word`, when that is at most a third of its length (at least 2).
pub fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let word: Vec<char> = word.chars().take(128).collect();
    let bound = (word.len() / 3).max(2);
    let edits = |candidate: &str| {
        let other: Vec<char> = candidate.chars().collect();
        let mut row: Vec<usize> = (0..=other.len()).collect();
        for (i, left) in word.iter().enumerate() {
            let mut diagonal = row[0];
            row[0] = i + 1;
            for (j, right) in other.iter().enumerate() {
                let same = diagonal + usize::from(!left.eq_ignore_ascii_case(right));
                diagonal = row[j + 1];
                row[j + 1] = same.min(row[j] + 1).min(row[j + 1] + 1);
            }
        }
        row[other.len()]
    };
    candidates
        .into_iter()
        .map(|candidate| (edits(candidate), candidate))
        .filter(|(distance, _)| *distance <= bound)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PORT: EnvVar =
        EnvVar { name: "CLOISTER_TEST_PORT", doc: "Where.", default: Some("80"), unit: None, since: "0.1.0" };
    const WAIT: EnvVar = EnvVar {
        name: "CLOISTER_TEST_WAIT_SECS",
        doc: "How long.",
        default: Some("5"),
        unit: Some("seconds"),
        since: "0.1.0",
    };

    #[test]
    fn all_problems_come_together_and_name_the_variable_and_the_value() {
        let environment = Environment::of([
            ("CLOISTER_TEST_PORT", "many"),
            ("CLOISTER_TEST_WAIT_SECS", "0"),
            ("CLOISTER_TEST_PROT", "1"),
            ("OTHER", "x"),
        ]);
        let mut reader = ConfigReader::new(&environment);
        assert_eq!(reader.parse::<u16>(&PORT), None);
        reader.seconds(&WAIT, 1..=60);
        reader.refuse_unknown("CLOISTER_TEST_", &[&PORT, &WAIT]);
        let error = reader.finish(()).expect_err("three problems");
        assert_eq!(
            error.problems,
            [
                "`CLOISTER_TEST_PORT` is `many`: invalid digit found in string",
                "`CLOISTER_TEST_WAIT_SECS` is `0`: accepted is 1 to 60 seconds",
                "`CLOISTER_TEST_PROT` is not a variable of this role; did you mean `CLOISTER_TEST_PORT`?",
            ]
        );
    }

    #[test]
    fn unset_and_empty_mean_the_default() {
        let environment = Environment::of([("CLOISTER_TEST_PORT", "")]);
        let mut reader = ConfigReader::new(&environment);
        assert_eq!(reader.parse::<u16>(&PORT), Some(80));
        assert_eq!(reader.seconds(&WAIT, 1..=60), Duration::from_secs(5));
        reader.finish(()).expect("no problem");
    }

    #[test]
    fn nearest_has_a_bound() {
        assert_eq!(nearest("sesion", ["session", "exec"]), Some("session"));
        assert_eq!(nearest("zzzzzz", ["session", "exec"]), None);
    }
}
