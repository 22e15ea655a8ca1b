//! Resource limits of a sandbox, and the quantities they are made of.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A number of bytes. Text form: a number with an optional unit `K`, `M`, `G`, `T` (or `KiB`…), powers of 1024.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ByteCount(pub u64);

impl ByteCount {
    /// Returns this many mebibytes.
    pub const fn mib(count: u64) -> Self {
        Self(count * 1024 * 1024)
    }

    /// Returns this many gibibytes.
    pub const fn gib(count: u64) -> Self {
        Self(count * 1024 * 1024 * 1024)
    }
}

/// Why a text is not a quantity.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not {expected}")]
pub struct QuantityError {
    text: String,
    expected: &'static str,
}

impl FromStr for ByteCount {
    type Err = QuantityError;

    fn from_str(text: &str) -> Result<Self, QuantityError> {
        let error = || QuantityError {
            text: text.chars().take(64).collect(),
            expected: "a size such as `512M`, `4GiB` or a number of bytes",
        };
        let digits = text.bytes().take_while(u8::is_ascii_digit).count();
        let number: u64 = text[..digits].parse().map_err(|_| error())?;
        let shift = match text[digits..].to_ascii_lowercase().as_str() {
            "" | "b" => 0,
            "k" | "kb" | "kib" => 10,
            "m" | "mb" | "mib" => 20,
            "g" | "gb" | "gib" => 30,
            "t" | "tb" | "tib" => 40,
            _ => return Err(error()),
        };
        number.checked_mul(1 << shift).map(Self).ok_or_else(error)
    }
}

impl fmt::Display for ByteCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (shift, unit) in [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")] {
            if self.0 >= 1 << shift {
                let whole = self.0 >> shift;
                let tenths = ((self.0 - (whole << shift)) * 10) >> shift;
                return if tenths == 0 {
                    write!(f, "{whole} {unit}")
                } else {
                    write!(f, "{whole}.{tenths} {unit}")
                };
            }
        }
        write!(f, "{} B", self.0)
    }
}

/// Thousandths of a CPU. Text form: a decimal number of CPUs with at most three places, such as `1.5`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct CpuMillis(pub u32);

impl FromStr for CpuMillis {
    type Err = QuantityError;

    fn from_str(text: &str) -> Result<Self, QuantityError> {
        let error = || QuantityError {
            text: text.chars().take(64).collect(),
            expected: "a number of CPUs such as `2` or `0.5`, at most three decimal places",
        };
        let (whole, part) = text.split_once('.').unwrap_or((text, ""));
        let is_digits = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
        if whole.is_empty() || part.len() > 3 || !is_digits(whole) || !is_digits(part) {
            return Err(error());
        }
        let whole: u32 = whole.parse().map_err(|_| error())?;
        let part: u32 = format!("{part:0<3}").parse().map_err(|_| error())?;
        whole.checked_mul(1000).and_then(|millis| millis.checked_add(part)).map(Self).ok_or_else(error)
    }
}

impl fmt::Display for CpuMillis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 % 1000 {
            0 => write!(f, "{}", self.0 / 1000),
            part => {
                let text = format!("{}.{part:03}", self.0 / 1000);
                f.write_str(text.trim_end_matches('0'))
            }
        }
    }
}

/// What one sandbox may use. Every field is enforced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Memory of the work inside, before the kernel kills it.
    pub memory: ByteCount,
    /// CPU time per wall time.
    pub cpus: CpuMillis,
    /// Processes and threads at one time.
    pub pids: u32,
    /// Bytes of the writable layer.
    pub disk: ByteCount,
}

impl Limits {
    /// What a session gets that asks for nothing.
    pub const DEFAULT: Self =
        Self { memory: ByteCount::mib(512), cpus: CpuMillis(1000), pids: 512, disk: ByteCount::gib(1) };

    /// The least that a shell needs to start; less is refused.
    pub const MINIMUM: Self =
        Self { memory: ByteCount::mib(16), cpus: CpuMillis(10), pids: 4, disk: ByteCount::mib(16) };

    /// The most that any session may ask for, whatever the hosts offer.
    pub const MAXIMUM: Self = Self {
        memory: ByteCount::gib(4096),
        cpus: CpuMillis(1_024_000),
        pids: 4_194_304,
        disk: ByteCount::gib(65_536),
    };

    /// Returns these limits, or the first field that is out of range.
    ///
    /// # Errors
    ///
    /// [`LimitError`] names the field, the value and the range that is accepted.
    pub fn validate(self) -> Result<Self, LimitError> {
        let byte_fields = [
            ("memory", self.memory, Self::MINIMUM.memory, Self::MAXIMUM.memory),
            ("disk", self.disk, Self::MINIMUM.disk, Self::MAXIMUM.disk),
        ];
        for (field, value, least, most) in byte_fields {
            if value < least || value > most {
                return Err(LimitError::new(field, &value, &least, &most));
            }
        }
        if self.cpus < Self::MINIMUM.cpus || self.cpus > Self::MAXIMUM.cpus {
            return Err(LimitError::new("cpus", &self.cpus, &Self::MINIMUM.cpus, &Self::MAXIMUM.cpus));
        }
        if self.pids < Self::MINIMUM.pids || self.pids > Self::MAXIMUM.pids {
            return Err(LimitError::new("pids", &self.pids, &Self::MINIMUM.pids, &Self::MAXIMUM.pids));
        }
        Ok(self)
    }
}

/// A limit outside of what is accepted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{field}` is {value}; accepted is {least} to {most}")]
pub struct LimitError {
    /// `memory`, `cpus`, `pids` or `disk`.
    pub field: &'static str,
    value: String,
    least: String,
    most: String,
}

impl LimitError {
    fn new(
        field: &'static str,
        value: &dyn fmt::Display,
        least: &dyn fmt::Display,
        most: &dyn fmt::Display,
    ) -> Self {
        Self { field, value: value.to_string(), least: least.to_string(), most: most.to_string() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_powers_of_1024_and_overflow_is_refused() {
        assert_eq!("512M".parse(), Ok(ByteCount::mib(512)));
        assert_eq!("4GiB".parse(), Ok(ByteCount::gib(4)));
        assert_eq!("123".parse(), Ok(ByteCount(123)));
        for bad in ["", "M", "1.5G", "-1", "4X", "99999999999T", " 1", "1 G"] {
            assert!(bad.parse::<ByteCount>().is_err(), "`{bad}` was accepted");
        }
        assert_eq!(ByteCount::mib(1536).to_string(), "1.5 GiB");
        assert_eq!(ByteCount(0).to_string(), "0 B");
    }

    #[test]
    fn cpus_have_three_places() {
        assert_eq!("2".parse(), Ok(CpuMillis(2000)));
        assert_eq!("0.5".parse(), Ok(CpuMillis(500)));
        assert_eq!("1.025".parse(), Ok(CpuMillis(1025)));
        for bad in ["", ".5", "1.0005", "-1", "1e3", "9999999999", "+1", "1.+5"] {
            assert!(bad.parse::<CpuMillis>().is_err(), "`{bad}` was accepted");
        }
        assert_eq!(CpuMillis(1500).to_string(), "1.5");
        assert_eq!(CpuMillis(2000).to_string(), "2");
    }

    #[test]
    fn each_limit_is_checked_and_named() {
        assert_eq!(Limits::DEFAULT.validate(), Ok(Limits::DEFAULT));
        let wrong = [
            (Limits { memory: ByteCount(1), ..Limits::DEFAULT }, "memory"),
            (Limits { cpus: CpuMillis(0), ..Limits::DEFAULT }, "cpus"),
            (Limits { pids: 0, ..Limits::DEFAULT }, "pids"),
            (Limits { disk: ByteCount(u64::MAX), ..Limits::DEFAULT }, "disk"),
        ];
        for (limits, field) in wrong {
            assert_eq!(limits.validate().map_err(|error| error.field), Err(field));
        }
    }
}
