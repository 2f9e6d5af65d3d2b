// A reporter of jest.
'use strict';
const { cut, place, relative, writer } = require('./lines.cjs');

module.exports = class {
    constructor() { this.say = writer('jest'); }

    onTestResult(test, result) {
        const file = relative(test.path);
        if (result.testExecError || (result.failureMessage && result.testResults.length === 0)) {
            const text = cut(result.failureMessage || (result.testExecError && result.testExecError.message));
            const [, line] = place(text, file);
            this.say({ event: 'test', id: file, name: file, outcome: 'error', file, fail_line: line,
                message: text.split('\n').map((l) => l.trim()).find((l) => l && !l.startsWith('●')) || 'failed', traceback: text });
        }
        const printed = (result.console || []).map((one) => one.message).join('\n');
        for (const one of result.testResults) {
            const names = [...one.ancestorTitles, one.title];
            const event = { event: 'test', id: [file, ...names].join(' > '), name: names.join(' > '), file,
                line: one.location ? one.location.line : null, outcome: OUTCOMES[one.status] || 'skipped',
                seconds: typeof one.duration === 'number' ? one.duration / 1000 : null };
            if (event.outcome === 'failed') {
                const text = cut((one.failureMessages || []).join('\n'));
                event.message = text.split('\n\n')[0].trim().slice(0, 2000);
                event.traceback = text;
                event.fail_line = place(text, file)[1];
                event.output = cut(printed);
            }
            this.say(event);
        }
    }

    onRunComplete(contexts, results) {
        if (results && results.runExecError) {
            const text = cut(results.runExecError.message);
            this.say({ event: 'test', id: 'jest', name: 'jest', outcome: 'error', message: text.slice(0, 2000), traceback: text });
        }
        if (!(results && results.wasInterrupted)) this.say({ event: 'end' });
    }
};

const OUTCOMES = { passed: 'passed', failed: 'failed', pending: 'skipped', skipped: 'skipped', todo: 'skipped', disabled: 'skipped' };
