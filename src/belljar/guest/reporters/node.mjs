// A reporter of node's own test runner: what it yields goes to the file that it was given as its destination.
import { writeFileSync } from 'node:fs';
import path from 'node:path';

import lines from './lines.cjs';

const { cut, place, relative } = lines;
const line = (event) => `${JSON.stringify(event)}\n`;
const out = process.env.BELLJAR_JS_OUT_OWN;

export default async function* (source) {
    yield line({ event: 'start', framework: 'node' });
    const above = new Map(); // file -> the names of the suites that are open, by depth
    const seen = new Map();
    const printed = new Map();
    for await (const { type, data } of source) {
        const key = data && data.file ? data.file : '';
        if (type === 'test:start') {
            const names = (above.get(key) || []).slice(0, data.nesting);
            names[data.nesting] = data.name;
            above.set(key, names);
        } else if (type === 'test:stdout' || type === 'test:stderr') {
            const text = (printed.get(key) || '') + data.message;
            if (text.length < 60000) printed.set(key, text);
        } else if (type === 'test:pass' || type === 'test:fail') {
            const event = told(type, data, key, above.get(key) || [], printed);
            if (event) {
                const count = (seen.get(event.id) || 0) + 1;
                seen.set(event.id, count);
                yield line(count > 1 ? { ...event, id: `${event.id} #${count}` } : event);
            }
        } else if (type === 'test:coverage' && out) {
            const files = (data.summary && data.summary.files) || [];
            const rows = files.map((one) => ({ path: relative(one.path), covered: one.coveredLineCount, total: one.totalLineCount }));
            writeFileSync(path.join(out, `coverage-${process.pid}.json`), JSON.stringify({ node: rows.filter((one) => one.path) }));
        }
    }
    yield line({ event: 'end' });
}

function told(type, data, key, open, printed) {
    const details = data.details || {};
    const error = details.error;
    const cause = error && error.cause && typeof error.cause === 'object' ? error.cause : error;
    const file = relative(data.file);
    const ofFile = data.nesting === 0 && (data.name === data.file || relative(data.name) === file) && file;
    if (details.type === 'suite' || ofFile) { // counts itself only if it failed for a reason of its own
        if (type === 'test:pass' || (error && error.failureType === 'subtestsFailed')) return null;
    }
    const names = [...open.slice(0, data.nesting), data.name];
    const outcome = data.skip !== undefined || data.todo !== undefined ? 'skipped' : type === 'test:pass' ? 'passed' : 'failed';
    const event = { event: 'test', id: [file, ...names].join(' > '), name: names.join(' > '), file, line: data.line || null,
        outcome: outcome === 'failed' && ofFile ? 'error' : outcome, seconds: (details.duration_ms || 0) / 1000 };
    if (outcome === 'failed') {
        const text = cut((cause && (cause.stack || cause.message)) || error);
        event.message = cut((cause && cause.message) || error).slice(0, 2000);
        event.traceback = text;
        event.fail_line = place(text, file)[1];
        event.output = cut(printed.get(key));
    }
    return event;
}
