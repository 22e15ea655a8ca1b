//! Terminals as people use them: tmux plays the window, its pane is what they would see.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test states what it expects by unwrapping it"
)]

mod support;

use std::process::Stdio;

use support::{CLOISTER, Up, can_run, skip, wait_for, which};

/// A window with one terminal in it.
struct Window<'a> {
    up: &'a Up,
    socket: String,
}

impl<'a> Window<'a> {
    /// Opens a window of this size that runs a command line of `cloister`, and prints its exit code behind it.
    fn open(up: &'a Up, name: &str, columns: u32, rows: u32, arguments: &str) -> Self {
        let window = Self { up, socket: up.path(&format!("{name}.tmux")).display().to_string() };
        let command = format!("{CLOISTER} {arguments}; echo \"[ended $?]\"; exec sleep 600");
        let (columns, rows) = (columns.to_string(), rows.to_string());
        window.tmux(&["new-session", "-d", "-x", &columns, "-y", &rows, &command]);
        window.tmux(&["set-option", "-g", "history-limit", "20000"]);
        window
    }

    fn tmux(&self, arguments: &[&str]) -> String {
        let output = self
            .up
            .program("tmux")
            .env("LC_ALL", "C.UTF-8")
            .args(["-u", "-S", &self.socket, "-f", "/dev/null"])
            .args(arguments)
            .output()
            .unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Types keys by their names in tmux.
    fn keys(&self, keys: &[&str]) {
        self.tmux(&[&["send-keys"], keys].concat());
    }

    /// Types a line.
    fn line(&self, text: &str) {
        self.tmux(&["send-keys", "-l", text]);
        self.keys(&["Enter"]);
    }

    /// Returns what the window shows.
    fn screen(&self) -> String {
        self.tmux(&["capture-pane", "-p"])
    }

    /// Waits until the window shows what is wanted, and returns all of it.
    fn shows(&self, what: &str, wanted: impl Fn(&str) -> bool) -> String {
        wait_for(what, || {
            let screen = self.screen();
            if wanted(&screen) { Ok(screen) } else { Err(screen) }
        })
    }

    /// Types a key until the window shows what is wanted: the program that it is for may not be quite there.
    fn key_until(&self, key: &str, what: &str, wanted: impl Fn(&str) -> bool) {
        self.shows(what, |screen| {
            let is_there = wanted(screen);
            if !is_there {
                self.keys(&[key]);
            }
            is_there
        });
    }

    /// Waits until some line of the window is this one.
    fn shows_line(&self, line: &str) -> String {
        self.shows(line, |screen| screen.lines().any(|shown| shown.trim() == line))
    }

    /// Returns the process of the client in the window.
    fn client(&self) -> i32 {
        let pane = self.tmux(&["list-panes", "-F", "#{pane_pid}"]);
        let children = format!("/proc/{0}/task/{0}/children", pane.trim());
        let children = std::fs::read_to_string(children).unwrap();
        children.split_whitespace().next().expect("a client runs").parse().unwrap()
    }
}

impl Drop for Window<'_> {
    fn drop(&mut self) {
        let mut kill = self.up.program("tmux");
        let _ = kill.args(["-S", &self.socket, "kill-server"]).output();
    }
}

fn can_look() -> bool {
    for program in ["tmux", "vim", "top"] {
        if !which(program) {
            skip(&format!("{program} is not installed"));
            return false;
        }
    }
    can_run()
}

#[test]
fn a_shell_is_a_place_to_work_in() {
    if !can_look() {
        return;
    }
    let up = Up::start();
    up.ok(&["session", "create", "--name", "box"]);
    let window = Window::open(&up, "w", 90, 30, "shell box");
    // The size from the first byte: the shell itself asks for it before it prints a prompt.
    window.shows("a prompt", |screen| screen.contains("box:/workspace#"));
    window.line("stty size");
    window.shows_line("30 90");

    window.line("vim --clean letter.txt");
    window.shows("vim", |screen| screen.lines().filter(|line| line.starts_with('~')).count() > 20);
    window.keys(&["i"]);
    window.tmux(&["send-keys", "-l", "über 10 €"]);
    window.keys(&["Escape"]);
    window.line(":wq");
    window.shows("the prompt again", |screen| !screen.contains('~'));
    assert_eq!(up.ok(&["exec", "box", "--", "cat", "letter.txt"]), "über 10 €");

    window.line("clear; top -d 0.2");
    let header = |screen: &str| screen.lines().next().unwrap_or_default().to_owned();
    let first = header(&window.shows("top", |screen| screen.starts_with("top - ")));
    window.shows("top to draw again", |screen| screen.starts_with("top - ") && header(screen) != first);
    // In a narrower window every line is cut anew.
    window.tmux(&["resize-window", "-x", "50", "-y", "20"]);
    window.shows("top in the new size", |screen| {
        screen.starts_with("top - ") && screen.lines().count() == 20 && screen.contains("%CPU\n")
            || screen.lines().all(|line| line.chars().count() <= 50) && screen.contains("PID USER")
    });
    window.keys(&["q"]);
    window.line("clear; stty size");
    window.shows_line("20 50");

    window.line("clear; echo go; sleep 600");
    window.shows_line("go");
    window.key_until("C-z", "a stopped job", |screen| screen.contains("Stopped"));
    window.line("clear; fg");
    window.shows_line("sleep 600");
    window.key_until("C-c", "the prompt", |screen| screen.contains("^C"));
    window.line("echo code=$?");
    window.shows_line("code=130");

    // Erasing takes a whole character, and a paste of two lines runs nothing before Enter.
    window.line("clear; echo go; cat");
    window.shows_line("go");
    window.tmux(&["send-keys", "-l", "aü"]);
    window.keys(&["BSpace", "b", "Enter", "C-d"]);
    window
        .shows("the line twice", |screen| screen.lines().filter(|line| line.trim_end() == "ab").count() == 2);
    window.line("clear");
    window.shows("an empty window", |screen| screen.trim() == "root@box:/workspace#");
    window.tmux(&["set-buffer", "echo one\necho two"]);
    window.tmux(&["paste-buffer", "-p"]);
    let pasted = window.shows("the paste", |screen| screen.contains("echo two"));
    assert!(!pasted.lines().any(|line| line.trim_end() == "one"), "{pasted}");
    window.keys(&["C-c"]);
    window.line("clear; exit 7");
    window.shows_line("[ended 7]");
}

#[test]
fn who_leaves_a_terminal_or_is_killed_comes_back_to_every_line() {
    if !can_look() {
        return;
    }
    let up = Up::start();
    up.ok(&["session", "create", "--name", "box"]);
    let window = Window::open(&up, "first", 80, 24, "shell box");
    window.shows("a prompt", |screen| screen.contains("box:/workspace#"));
    window.line(
        "for i in $(seq 1 3000); do echo line $i; done; read go; seq 3001 6000 | sed 's/^/line /'; echo done",
    );
    window.shows_line("line 3000");
    support::kill(window.client(), rustix::process::Signal::KILL);
    window.shows_line("[ended 137]");

    let exec = up.json(&["ps", "box"])["execs"][0]["id"].as_str().unwrap().to_owned();
    let again = Window::open(&up, "second", 120, 24, "attach box");
    again.shows_line("line 3000");
    // What it types goes to the same program, and another window sees it.
    let watcher = Window::open(&up, "third", 80, 24, &format!("attach --read-only box {exec}"));
    watcher.shows_line("line 3000");
    again.line("go");
    for window in [&again, &watcher] {
        window.shows_line("done");
    }
    watcher.tmux(&["send-keys", "-l", "not typed"]);
    again.keys(&["C-p", "C-q"]);
    again.shows_line("[ended 0]");
    assert!(
        again.screen().contains(&format!("`cloister attach box {exec}` comes back")),
        "{}",
        again.screen()
    );

    // By a program: all of it, in order, and nothing twice; the end of its own input ends nothing.
    let mut reader =
        up.command(&["attach", "box"]).stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
    let third = Window::open(&up, "fourth", 80, 24, "attach box");
    third.shows_line("done");
    third.line("exit 3");
    third.shows_line("[ended 3]");
    let mut text = String::new();
    std::io::Read::read_to_string(reader.stdout.as_mut().unwrap(), &mut text).unwrap();
    assert_eq!(reader.wait().unwrap().code(), Some(3));
    // What the shell sends to the terminal before a command ends with a carriage return.
    let shown = text.lines().map(|line| line.rsplit('\r').next().unwrap_or_default().to_owned());
    let lines: Vec<String> = shown.filter(|line| line.starts_with("line ")).collect();
    let expected: Vec<String> = (1..=6000).map(|number| format!("line {number}")).collect();
    assert!(lines == expected, "{} lines of {}", lines.len(), expected.len());
    assert!(!text.contains("not typed"), "a reader that only reads typed something");
}

#[test]
fn without_a_window_a_terminal_has_the_usual_size_and_one_stream() {
    if !can_run() {
        return;
    }
    let up = Up::start();
    let told =
        up.run(&["run", "-t", "--", "sh", "-c", "tty -s && stty size && echo err >&2; exit 5"]).expect(5);
    assert_eq!(told.bytes(), b"24 80\r\nerr\r\n");
    // Piped input is typed, and its end is the end.
    let typed = up.run_with_input(&["run", "-it", "--", "cat"], b"hello\n").expect(0);
    assert_eq!(typed.stdout().matches("hello").count(), 2, "echo and output: {}", typed.stdout());
    up.run(&["run", "-t", "--detach-keys", "ctrl-1", "--", "true"])
        .expect(125)
        .says(&["ctrl-1", "ctrl-p,ctrl-q"]);
    up.ok(&["session", "create", "--name", "idle"]);
    up.run(&["attach", "idle"]).expect(125).says(&["nothing runs", "cloister shell idle"]);
}
