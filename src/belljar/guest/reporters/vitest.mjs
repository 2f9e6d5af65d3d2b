// A reporter of vitest.
import lines from './lines.cjs';

const { cut, place, relative, writer } = lines;

export default class {
    constructor() { this.say = writer('vitest'); this.printed = new Map(); }

    onUserConsoleLog(log) {
        const text = (this.printed.get(log.taskId) || '') + log.content;
        if (text.length < 60000) this.printed.set(log.taskId, text);
    }

    onFinished(files = [], errors = []) {
        if (this.ended) return;
        this.ended = true;
        for (const file of files) this.tell(file, [], relative(file.filepath));
        for (const error of errors) {
            const text = cut(error && (error.stack || error.message));
            this.say({ event: 'test', id: `error: ${text.split('\n')[0]}`, name: 'unhandled error', outcome: 'error',
                message: text.split('\n')[0], traceback: text });
        }
        this.say({ event: 'end' });
    }

    onTestRunEnd(modules, errors) { // of vitest 4, which calls no onFinished
        this.onFinished(modules.map((one) => one.task), errors);
    }

    tell(task, above, file) {
        const result = task.result || {};
        if (task.type === 'suite' || task.tasks) {
            if (result.errors && result.errors.length) this.one(task, above.length ? above : [file], file, 'error');
            for (const one of task.tasks || []) this.tell(one, task.filepath ? [] : [...above, task.name], file);
            return;
        }
        const outcome = result.state === 'pass' ? 'passed' : result.state === 'fail' ? 'failed' : 'skipped';
        this.one(task, [...above, task.name], file, outcome);
    }

    one(task, names, file, outcome) {
        const result = task.result || {};
        const event = { event: 'test', id: [file, ...names].join(' > '), name: names.join(' > '), file, outcome,
            line: task.location ? task.location.line : null,
            seconds: typeof result.duration === 'number' ? result.duration / 1000 : null };
        if (outcome === 'failed' || outcome === 'error') {
            const text = cut((result.errors || []).map((one) => one.stack || one.message).join('\n'));
            event.message = cut((result.errors || [{}])[0].message || 'failed').slice(0, 2000);
            event.traceback = text;
            event.fail_line = place(text, file)[1];
            event.output = cut(this.printed.get(task.id));
        }
        this.say(event);
    }
}
