//! Columns as wide as their widest cell; numbers stand to the right.

/// Which tables a column is part of, and where its cells stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Column {
    name: &'static str,
    right: bool,
    only_wide: bool,
}

#[derive(Debug, Clone, Default)]
pub struct Table {
    columns: Vec<Column>,
    rows: Vec<Vec<String>>,
    /// Lines below the table.
    notes: Vec<String>,
}

impl Table {
    /// Names of columns: `>NAME` stands to the right, `+NAME` is shown in wide tables only, `+>NAME` both.
    pub fn new(columns: &[&'static str]) -> Self {
        let column = |name: &&'static str| {
            let (name, only_wide) = name.strip_prefix('+').map_or((*name, false), |rest| (rest, true));
            let (name, right) = name.strip_prefix('>').map_or((name, false), |rest| (rest, true));
            Column { name, right, only_wide }
        };
        Self { columns: columns.iter().map(column).collect(), ..Self::default() }
    }

    /// One cell per column, those of wide tables included. An empty cell is shown as `-`.
    pub fn row<I: IntoIterator<Item: Into<String>>>(&mut self, cells: I) {
        let row: Vec<String> = cells.into_iter().map(Into::into).collect();
        debug_assert_eq!(row.len(), self.columns.len(), "{row:?}");
        self.rows.push(row);
    }

    /// A line below the table.
    pub fn note(&mut self, line: impl Into<String>) {
        self.notes.push(line.into());
    }

    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    pub fn lines(&self, wide: bool) -> Vec<String> {
        let shown: Vec<usize> = (0..self.columns.len()).filter(|at| wide || !self.columns[*at].only_wide).collect();
        let cell = |row: &[String], at: usize| match row.get(at).map(String::as_str) {
            None | Some("") => "-".to_owned(),
            Some(text) => text.to_owned(),
        };
        let mut rows: Vec<Vec<String>> = Vec::new();
        if !self.columns.is_empty() {
            rows.push(shown.iter().map(|at| self.columns[*at].name.to_owned()).collect());
        }
        rows.extend(self.rows.iter().map(|row| shown.iter().map(|at| cell(row, *at)).collect()));
        let width = |index: usize| rows.iter().map(|row| row[index].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..shown.len()).map(width).collect();
        let mut lines: Vec<String> = Vec::new();
        for row in &rows {
            let cells = row.iter().zip(&widths).zip(&shown).map(|((cell, width), at)| {
                let width = *width;
                if self.columns[*at].right { format!("{cell:>width$}") } else { format!("{cell:<width$}") }
            });
            lines.push(cells.collect::<Vec<_>>().join("  ").trim_end().to_owned());
        }
        lines.extend(self.notes.iter().cloned());
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_they_must_be() {
        let mut table = Table::new(&["NAME", ">N", "+ZONE"]);
        table.row(["a-long-name", "7", "a"]);
        table.row(["b", "12", ""]);
        assert_eq!(table.lines(false), ["NAME          N", "a-long-name   7", "b            12"]);
        assert_eq!(table.lines(true), ["NAME          N  ZONE", "a-long-name   7  a", "b            12  -"]);
    }
}
