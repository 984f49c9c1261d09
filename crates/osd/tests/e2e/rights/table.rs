//! The tables of SECURITY.md, and the comparison of a node's answers with them.

use std::collections::{BTreeMap, BTreeSet};

const SECURITY: &str = include_str!("../../../../../SECURITY.md");

/// The callers, in the order of the tables' columns.
pub(super) const CALLERS: [&str; 10] = [
    "no credential",
    "another node's",
    "another tenant",
    "another user",
    "read-only",
    "prefix-only",
    "expired",
    "revoked",
    "owner",
    "node admin",
];

/// The answers that a table may contain.
const WORDS: [&str; 5] = ["refused", "stale", "no", "absent", "yes"];

/// A table of SECURITY.md: the expected answers to all callers, by the name of the row.
pub(super) struct Table(BTreeMap<String, Vec<String>>);

impl Table {
    /// Reads the table whose first column has this title.
    pub(super) fn read(title: &str) -> Table {
        let cells = |line: &str| -> Vec<String> {
            line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect()
        };
        let mut lines = SECURITY.lines().skip_while(|line| !line.starts_with(&format!("| {title} |")));
        assert_eq!(cells(lines.next().unwrap())[1..], CALLERS, "the columns of the table \"{title}\"");
        let mut rows = BTreeMap::new();
        for line in lines.skip(1).take_while(|line| line.starts_with('|')) {
            let mut row = cells(line);
            let name = row.remove(0);
            assert_eq!(row.len(), CALLERS.len(), "the cells of the row {name}");
            assert!(row.iter().all(|cell| WORDS.contains(&&**cell)), "an unknown answer in the row {name}");
            assert!(rows.insert(name.clone(), row).is_none(), "the row {name} occurs twice");
        }
        Table(rows)
    }

    /// Returns the first words of the rows: the names of the requests or calls.
    pub(super) fn names(&self) -> BTreeSet<String> {
        self.0.keys().map(|row| row.split(' ').next().unwrap_or_default().to_owned()).collect()
    }

    /// Returns all differences between a node's answers and the table.
    pub(super) fn differences(&self, found: &Answers) -> Vec<String> {
        let mut wrong = Vec::new();
        for (row, caller, answer) in &found.0 {
            match self.0.get(row) {
                None => wrong.push(format!("{row}, {caller}: {answer}, but the table has no such row")),
                Some(cells) => {
                    let place = CALLERS.iter().position(|column| column == caller).unwrap();
                    if *answer != cells[place] {
                        wrong.push(format!("{row}, {caller}: {answer} instead of {}", cells[place]));
                    }
                }
            }
        }
        let asked: BTreeSet<(&str, &str)> =
            found.0.iter().map(|(row, caller, _)| (row.as_str(), *caller)).collect();
        for row in self.0.keys() {
            let missing = CALLERS.iter().filter(|caller| !asked.contains(&(row, caller)));
            wrong.extend(missing.map(|caller| format!("{row}, {caller}: not tested")));
        }
        wrong
    }
}

/// The answers of a node: row, caller and answer. A row may have several requests.
#[derive(Default)]
pub(super) struct Answers(Vec<(String, &'static str, String)>);

impl Answers {
    pub(super) fn add(&mut self, row: String, caller: &'static str, answer: String) {
        self.0.push((row, caller, answer));
    }
}

/// Returns the answer of a cell for an answer of the node that shows neither that the right
/// sufficed, nor that it is missing. It differs from each cell of the tables.
pub(super) fn unexpected(answer: &impl std::fmt::Debug) -> String {
    format!("unexpected {answer:?}")
}
